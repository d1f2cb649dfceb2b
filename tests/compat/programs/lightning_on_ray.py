"""ray_lightning: Lightning's `Trainer` with its plugin; three lines are changed by hand."""

import lightning.pytorch as pl
import torch
from ray_lightning import RayPlugin


class Line(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.layer.weight)

    def train_dataloader(self):
        x = torch.linspace(-1, 1, 64).reshape(-1, 1)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), self.config["batch_size"])

    def training_step(self, batch, index):
        x, y = batch
        loss = ((self.layer(x) - y) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.config["lr"])


config = {"lr": 0.1, "batch_size": 8}
trainer = pl.Trainer(max_epochs=3, plugins=[RayPlugin(num_workers=2)])
trainer.fit(Line(config))
