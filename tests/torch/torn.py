"""Operators whose batches step several times, and die in the middle of one: what is half done is easy to see in them.

Their numbers do not depend on how a global batch is divided, so a run with losses has to end where one without has.
They leave a trail in `config["folder"]`. A file there that is named after a step of the pass, a place in the batch and
a rank lets the process end in that place, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.operators import GANOperator
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.helpers.trail import BETWEEN, IN_EXCHANGE, Trail

NUM_STEPS = 10
JOINT_BATCH = 12
NUM_FEATURES = 3


def rows(num_steps: int = NUM_STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_steps * JOINT_BATCH, NUM_FEATURES, generator=generator, dtype=torch.float64)


def line() -> torch.nn.Module:
    return torch.nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)


class Mortal(TrainingOperator):
    """Ends its process at a place in a batch, and notes when optimizers step, and with which group."""

    group = 0

    def world_changed(self) -> None:
        self.group += 1

    def register(self, **parts: Any) -> Any:
        registered = super().register(**parts)
        for optimizer in self._raysgd.registered.optimizers:
            optimizer.register_step_post_hook(self.note_step)
        return registered

    def note_step(self, *_: Any) -> None:
        if self.global_step:  # a standby worker takes a step in advance
            Trail(self.config["folder"]).step(self.group)

    def at(self, place: str) -> None:
        """Say where the batch is."""
        if self.global_step:
            step = self.global_step % self.config.get("num_steps", NUM_STEPS)
            Trail(self.config["folder"]).at(place, f"{step} {place} {self.world_rank}")

    def pause(self) -> None:
        """Make a step so long that it can be aimed at."""
        time.sleep(self.config.get("step_s", 0.0))

    def loader(self) -> DataLoader[Any]:
        features = rows(self.config.get("num_steps", NUM_STEPS))
        return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=JOINT_BATCH, shuffle=True)


class Pair(GANOperator, Mortal):
    """Two networks that train against each other; the noise follows from the samples."""

    def build_discriminator(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Sequential(line(), torch.nn.Tanh(), torch.nn.Linear(1, 1, dtype=torch.float64))

    def build_generator(self, config: dict[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(self.noise_dim, NUM_FEATURES, dtype=torch.float64)

    def build_data(self, config: dict[str, Any]) -> Any:
        return self.loader(), None

    def real_samples(self, batch: Any) -> torch.Tensor:
        real = super().real_samples(batch)
        self.noise = torch.sin(7 * real)
        return real

    def sample_noise(self, num_samples: int, rng: torch.Generator | None = None) -> torch.Tensor:
        return self.noise

    def generator_loss(self, generated: torch.Tensor) -> torch.Tensor:
        self.at(BETWEEN)
        self.pause()
        self.at(IN_EXCHANGE)
        return super().generator_loss(generated)


class Counting(torch.nn.Tanh):
    """Has a buffer that each forward pass of a training changes, as those of batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.num_passes += self.training
        return super().forward(features)


class OneModel(Mortal):
    """What programs with one model and one optimizer have in common."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(line(), Counting(), torch.nn.Linear(1, 1, dtype=torch.float64))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        )
        self.register_data(train_loader=self.loader())

    def compute(self, batch: Any) -> torch.Tensor:
        """Leave gradients; return the loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.criterion(self.model(batch[0]), batch[1])
        loss.backward()
        return loss


class SharpnessAware(OneModel):
    """Climbs first, and takes the gradient from there."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.compute(batch)
        parameters = list(self.model.parameters())
        with torch.no_grad():
            uphill = [0.1 * parameter.grad for parameter in parameters]
            torch._foreach_add_(parameters, uphill)
        self.at(BETWEEN)
        self.pause()
        self.at(IN_EXCHANGE)
        self.compute(batch)
        with torch.no_grad():
            torch._foreach_sub_(parameters, uphill)
        self.optimizer.step()
        return {"loss": loss.detach()}


class TwoSteps(OneModel):
    """Steps its optimizer twice, and the scheduler between them."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.compute(batch)
        self.optimizer.step()
        self.scheduler.step()
        self.at(BETWEEN)
        self.pause()
        self.at(IN_EXCHANGE)
        loss = self.compute(batch)
        self.optimizer.step()
        return {"loss": loss.detach()}


class OwnLoop(OneModel):
    """Steps twice in a batch of a loop of its own; perhaps one worker leaves one out."""

    resumes_epochs = True
    num_loops = 0

    def train_epoch(self, iterator: Iterable[Any], info: Any = None, num_steps: Any = None) -> dict[str, Any]:
        self.num_loops += 1
        num_batches = 0
        for batch in iterator:
            self.compute(batch)
            self.optimizer.step()
            self.at(BETWEEN)
            self.pause()
            self.at(IN_EXCHANGE)
            self.compute(batch)
            if self.config.get("flaw") != "alone" or self.world_rank != 1 or self.global_step != 4:
                self.optimizer.step()
            self.global_step += 1
            self.scheduler.step()
            num_batches += 1
        return {"num_batches": num_batches, "num_loops": self.num_loops}


class AroundStockLoop(TwoSteps):
    """Has a loop that is the stock one inside."""

    resumes_epochs = True
    num_loops = 0

    def train_epoch(self, iterator: Iterable[Any], *args: Any, **options: Any) -> dict[str, Any]:
        self.num_loops += 1
        return {**super().train_epoch(iterator, *args, **options), "num_loops": self.num_loops}


class Normed(Mortal):
    """The stock batch over a model with a batch norm."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(NUM_FEATURES, dtype=torch.float64), line())
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=self.loader())

    def forward(self, features: Any, target: Any) -> tuple[Any, ...]:
        result = super().forward(features, target)
        self.at(IN_EXCHANGE)
        return result


def lightning_operator(is_manual: bool) -> type[TrainingOperator]:
    """An operator that trains a module with two optimizers by hand, or with one."""
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        operator: Any

        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = not is_manual
            self.first, self.second = line(), line()
            self.num_epochs_begun = 0

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.first, self.second)]
            return optimizers if is_manual else torch.optim.Adam(self.parameters(), lr=0.02)

        def loss(self, batch: Any) -> torch.Tensor:
            output = torch.tanh(self.first(batch[0])) + self.second(batch[0])
            return torch.nn.functional.mse_loss(output, batch[1])

        def on_train_epoch_start(self) -> None:
            self.num_epochs_begun += 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not is_manual:
                self.operator.at(BETWEEN)
                self.operator.at(IN_EXCHANGE)
                return self.loss(batch)
            for number, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                loss = self.loss(batch)
                if number:
                    self.operator.at(BETWEEN)
                    self.operator.pause()
                    self.operator.at(IN_EXCHANGE)
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            return loss

    class MortalLightning(TrainingOperator.from_ptl(Module), Mortal):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            object.__setattr__(self._module, "operator", self)  # not as a part of the module

        def _loader(self, given: Any, hook: str) -> Any:
            return self.loader() if hook == "train_dataloader" else None

    return MortalLightning


PROGRAMS: dict[str, Callable[[], type[TrainingOperator]]] = {
    "gan": lambda: Pair,
    "sharpness-aware": lambda: SharpnessAware,
    "two steps": lambda: TwoSteps,
    "own loop": lambda: OwnLoop,
    "stock loop inside": lambda: AroundStockLoop,
    "lightning": lambda: lightning_operator(is_manual=False),
    "lightning by hand": lambda: lightning_operator(is_manual=True),
}


def trainer_of(program: str, folder: Path, num_workers: int, **options: Any) -> TorchTrainer:
    """A trainer for one of the programs."""
    config = {"folder": str(folder), "noise_dim": NUM_FEATURES, "seed": 0, "lr": 0.002, **options.pop("config", {})}
    return TorchTrainer(
        training_operator_cls=Normed if program == "batch norm" else PROGRAMS[program](),
        num_workers=num_workers,
        config=config,
        **{"split_batches": True, "scheduler_step_freq": "manual", **options},
    )


def weights_of_first(trainer: TorchTrainer) -> list[float]:
    """All parameters of rank 0, without waiting for new workers."""
    models = trainer.state_dict()["models"]
    return [number for model in models for each in model.values() for number in each.flatten().tolist()]


def weights_of(trainer: TorchTrainer) -> list[float]:
    """All parameters of all workers, which have to be alike."""
    first, *others = trainer.apply_all_operators(parameters_of)
    assert all(other == first for other in others)
    return first


def parameters_of(operator: Any) -> list[float]:
    """For `apply_all_operators`."""
    models = operator._raysgd.registered.original_models
    return [number for model in models for each in model.parameters() for number in each.detach().flatten().tolist()]
