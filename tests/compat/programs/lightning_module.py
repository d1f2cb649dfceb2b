"""Ray 1.x: an operator of a `LightningModule`, which takes the config."""

import lightning.pytorch as pl
import ray
import torch
from ray.util.sgd import TorchTrainer
from ray.util.sgd.torch import TrainingOperator


class Line(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.lr, self.batch_size = config["lr"], config["batch_size"]
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.layer.weight)

    def train_dataloader(self):
        x = torch.linspace(-1, 1, 64).reshape(-1, 1)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=self.batch_size)

    def val_dataloader(self):
        return self.train_dataloader()

    def training_step(self, batch, index):
        x, y = batch
        loss = ((self.layer(x) - y) ** 2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        return {"val_loss": ((self.layer(x) - y) ** 2).mean().item()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
Operator = TrainingOperator.from_ptl(Line)
trainer = TorchTrainer(
    training_operator_cls=Operator, num_workers=2, config={"lr": 0.1, "batch_size": 8}, use_gpu=False, use_tqdm=False
)
for _ in range(3):
    trainer.train()
    print("loss", trainer.validate()["val_loss"])
trainer.shutdown()
