"""A module of Lightning whose model counts how often each sample was used. Workers import this."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule

from tests.sequences import deaths
from tests.sequences.torch_trainers import Counts, negative_mean, optimizer_of


class Module(LightningModule):
    """Config: `folder` of deaths."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        deaths.install(config["folder"])
        self.counts = Counts()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = negative_mean(self.counts(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", negative_mean(self.counts(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.counts(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.counts)
