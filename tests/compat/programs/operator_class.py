"""Ray 1.x: an operator class, the guide's way, with names from several modules."""

import ray
import torch
from ray.util.sgd import TorchTrainer
from ray.util.sgd.torch import TrainingOperator
from ray.util.sgd.torch.constants import SCHEDULER_STEP_EPOCH
from ray.util.sgd.utils import BATCH_SIZE


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
        self.register_data(train_loader=torch.utils.data.DataLoader(data, batch_size=config[BATCH_SIZE]))

    def train_batch(self, batch, batch_info):
        metrics = super().train_batch(batch, batch_info)
        return {"loss": metrics["train_loss"], self.counted: metrics[self.counted]}


ray.init(num_cpus=2, include_dashboard=False)
trainer = TorchTrainer(
    training_operator_cls=Points,
    num_workers=2,
    scheduler_step_freq=SCHEDULER_STEP_EPOCH,
    config={"lr": 0.1, BATCH_SIZE: 16},
)
for _ in range(3):
    print("loss", trainer.train()["loss"])
trainer.shutdown()
