"""Ray 1.x: creator functions as an operator, and an operator with the first signature of `train_batch`."""

import ray
import torch
from ray.util.sgd.torch import TorchTrainer
from ray.util.sgd.torch.examples.train_example import LinearDataset
from ray.util.sgd.torch.training_operator import TrainingOperator


def model_creator(config):
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=config["lr"])


def scheduler_creator(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)


def data_creator(config):
    train, validation = LinearDataset(2, 5, size=64), LinearDataset(2, 5, size=64)
    return torch.utils.data.DataLoader(train, batch_size=8), torch.utils.data.DataLoader(validation, batch_size=8)


class Counting(TrainingOperator):
    def setup(self, config):
        model = model_creator(config)
        optimizer = optimizer_creator(model, config)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=data_creator(config)[0])

    def train_batch(self, batch, batch_idx):
        metrics = super().train_batch(batch, batch_info={"batch_idx": batch_idx})
        return {**metrics, "at": batch_idx}


Created = TrainingOperator.from_creators(
    model_creator=model_creator,
    optimizer_creator=optimizer_creator,
    scheduler_creator=scheduler_creator,
    data_creator=data_creator,
    loss_creator=torch.nn.MSELoss,
)
ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
trainer = TorchTrainer(
    training_operator_cls=Created, scheduler_step_freq="epoch", num_workers=2, config={"lr": 0.01}, use_tqdm=False
)
for _ in range(3):
    print("loss", trainer.train()["train_loss"])
trainer.validate()
trainer.shutdown()

trainer = TorchTrainer(training_operator_cls=Counting, num_workers=1, config={"lr": 0.01})
result = trainer.train()
assert result["last_at"] == result["batch_count"] - 1
trainer.shutdown()
