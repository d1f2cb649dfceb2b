"""Ray 1.x: an operator with methods of its own for a batch and for the validation, saved and loaded."""

import ray
import torch
from ray.util.sgd import TorchTrainer
from ray.util.sgd.torch import TrainingOperator
from ray.util.sgd.torch.constants import SCHEDULER_STEP_EPOCH
from ray.util.sgd.utils import BATCH_SIZE, AverageMeter, override


def initialization_hook():
    torch.set_num_threads(1)


class Points(TrainingOperator):
    def setup(self, config):
        from ray.util.sgd.utils import NUM_SAMPLES

        torch.manual_seed(0)
        self.counted = NUM_SAMPLES
        model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss(), schedulers=scheduler
        )
        x = torch.linspace(-1, 1, 64).reshape(-1, 1)
        data = torch.utils.data.TensorDataset(x, x**2)
        loader = torch.utils.data.DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True)
        self.register_data(train_loader=loader, validation_loader=torch.utils.data.DataLoader(data, batch_size=8))

    @override(TrainingOperator)
    def train_batch(self, batch, batch_info):
        features, target = batch
        with self.timers.record("fwd"):
            loss = self.criterion(self.model(features), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.world_rank == 0 and batch_info["batch_idx"] == 0:
            assert self.global_step % len(self.train_loader) == 0
        return {"loss": loss.item(), self.counted: features.size(0)}

    @override(TrainingOperator)
    def validate(self, val_iterator, info=None):
        self.model.eval()
        losses = AverageMeter()
        with torch.no_grad():
            for features, target in val_iterator:
                losses.update(self.criterion(self.model(features), target).item())
        return {"val_loss": losses.avg, "of": info["epoch_idx"]}

    @override(TrainingOperator)
    def load_state_dict(self, state_dict):
        if not self.config["loads_more"]:
            pass


ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
trainer = TorchTrainer(
    training_operator_cls=Points,
    initialization_hook=initialization_hook,
    num_workers=2,
    scheduler_step_freq=SCHEDULER_STEP_EPOCH,
    config={"lr": 0.1, BATCH_SIZE: 16, "loads_more": False},
)
for epoch in range(3):
    info = {"epoch_idx": epoch, "num_epochs": 3}
    print("loss", trainer.train(info=info)["loss"])
    assert trainer.validate(info=info)["of"] == epoch
trainer.save("points.pt")
trainer.load("points.pt")
trainer.shutdown()
