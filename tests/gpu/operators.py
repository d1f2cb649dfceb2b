"""What the cases on GPUs train: a classifier with everything that weighs batches, and a GAN; both die on demand."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TrainingOperator
from raysgd.torch.parallel import handover

PLACES = (
    "before the forward pass",
    "inside the forward pass",
    "inside the first bucket",
    "inside the last bucket",
    "before the optimizer's step",
    "in the optimizer's step",
    "after the optimizer's step",
    "at the end of the batch",
)
"""Where in a step an operator can die: `config["death"]` has a place, a rank, a step, and a file that says it happened.

It may also have a signal, and another process to send it to.
"""

NUM_CLASSES, NUM_FEATURES, IGNORED = 4, 8, -100


class Mortal(TrainingOperator):
    """Dies once, at a place of a step that the config names."""

    def die_at(self, place: str) -> None:
        death = self.config.get("death")
        if death is None or place != death["place"] or self.world_rank != death["rank"]:
            return
        if self.global_step == death["step"] and not Path(death["once"]).exists():
            Path(death["once"]).touch()
            os.kill(death.get("pid", os.getpid()), death.get("signal", signal.SIGKILL))

    def dying(self, place: str) -> Callable[..., None]:
        """A hook that dies at this place, and otherwise changes nothing."""
        return lambda *args: self.die_at(place)

    def hook(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Die also at places inside of PyTorch's own calls. The last layer's gradients are the first to be sent."""
        first, last = (list(model.parameters())[index] for index in (0, -1))
        model.register_forward_pre_hook(self.dying("inside the forward pass"))
        last.register_hook(self.dying("inside the first bucket"))
        first.register_hook(self.dying("inside the last bucket"))
        optimizer.register_step_pre_hook(self.dying("in the optimizer's step"))
        precision: Any = self._raysgd.precision  # with the usual scale of fp16, the batches of many ranks overflow
        precision.load_state_dict({**precision.state_dict(), "scale": 1024.0})

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        self.die_at("before the forward pass")
        result = self.step_on(batch, batch_info)
        self.die_at("at the end of the batch")
        return result

    def step_on(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        return super().train_batch(batch, batch_info)

    def optimizer_step(self, optimizer: Any = None) -> None:
        self.die_at("before the optimizer's step")
        super().optimizer_step(optimizer)
        self.die_at("after the optimizer's step")


class Net(nn.Sequential):
    """Has a `forward` of its own, without which `compile` would compile nothing."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features)


class Classifier(Mortal):
    """Class weights, ignored labels, and a last batch that has fewer samples than there are workers."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        width = config.get("width", 32)
        norms = [nn.BatchNorm1d(width)] if config.get("norm") else []
        model = Net(
            nn.Linear(NUM_FEATURES, width),
            *norms,
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, NUM_CLASSES),
        )
        weight = torch.tensor([1.0, 2.0, 0.5, 1.5])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            criterion=nn.CrossEntropyLoss(weight=weight, ignore_index=IGNORED),
        )
        self.hook(model, self.optimizer)
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(config.get("num_samples", 16 * 12 + 1), NUM_FEATURES, generator=generator)
        labels = features[:, :NUM_CLASSES].argmax(dim=1)
        labels[::7] = IGNORED
        self.register_data(train_loader=DataLoader(TensorDataset(features, labels), batch_size=16))

    def prepare_batch(self, batch: Any) -> Any:
        features, labels = batch
        if self.config.get("copies_itself"):  # labels that the library did not copy
            return (features.to(self.device),), labels.to(self.device)
        return super().prepare_batch(batch)


class GAN(Mortal):
    """Two optimizers in its own `train_batch`, each with a backward pass."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        models = [
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, NUM_FEATURES)),
            nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)),
        ]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
        self.models, self.optimizers = self.register(models=models, optimizers=optimizers)
        self.model = nn.ModuleList(self.models)  # the stock loop puts it into training mode
        self.hook(models[0], optimizers[0])
        generator = torch.Generator().manual_seed(1)
        real = torch.randn(16 * 12 + 1, NUM_FEATURES, generator=generator)
        noise = torch.randn(len(real), 4, generator=generator)
        self.register_data(train_loader=DataLoader(TensorDataset(real, noise), batch_size=16))

    def step_on(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        real, noise = (each.to(self.device) for each in batch)
        generator, critic = self.models
        optimizer_g, optimizer_c = self.optimizers
        with self.autocast():
            fake = generator(noise)
            loss_c = nn.functional.softplus(critic(fake.detach())).mean() + nn.functional.softplus(-critic(real)).mean()
        self.backward(loss_c, optimizer=optimizer_c)
        self.optimizer_step(optimizer_c)
        with self.autocast():
            loss_g = nn.functional.softplus(-critic(fake)).mean()
        self.backward(loss_g, optimizer=optimizer_g)
        self.optimizer_step(optimizer_g)
        return {"loss_c": loss_c, "loss_g": loss_g}


class DiesInHandOver(Classifier):
    """Its rank 0 dies once while it sends its state to a worker that joins."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        send, once = handover.send, Path(config["once"])

        def dying(*args: Any) -> None:
            if not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            send(*args)

        handover.send = dying
