"""Operators whose batches step several times, and die in the middle of one: what is half done is easy to see in them.

Their numbers do not depend on how a global batch is divided, so a run with losses has to end where one without has.
A file in `config["folder"]` that is named after a step of the pass, a place in the batch and a rank lets the process
end in that place, once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.operators import GANOperator
from raysgd.torch import TorchTrainer, TrainingOperator

NUM_STEPS = 10
JOINT_BATCH = 12
NUM_FEATURES = 3
BETWEEN, IN_EXCHANGE = "between", "exchange"
_INTO_EXCHANGE_S = 0.0005


def line() -> torch.nn.Module:
    return torch.nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)


class Mortal(TrainingOperator):
    """Ends its process at a place in a batch."""

    def at(self, place: str) -> None:
        """Say where the batch is."""
        death = Path(self.config["folder"], f"{self.global_step % NUM_STEPS} {place} {self.world_rank}")
        if not self.global_step or not death.exists():  # a standby worker takes a step in advance
            return
        death.unlink()
        if place == BETWEEN:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(_INTO_EXCHANGE_S, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(NUM_STEPS * JOINT_BATCH, NUM_FEATURES, generator=generator, dtype=torch.float64)
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


class TwoSteps(Mortal):
    """Steps its optimizer twice in a batch, and the scheduler between or behind."""

    resumes_epochs = True
    num_loops = 0

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


class OwnLoop(TwoSteps):
    """Has a loop of its own; perhaps one worker leaves a step out."""

    def train_epoch(self, iterator: Iterable[Any], info: Any = None, num_steps: Any = None) -> dict[str, Any]:
        self.num_loops += 1
        num_batches = 0
        for batch in iterator:
            self.compute(batch)
            self.optimizer.step()
            self.at(BETWEEN)
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

    def train_epoch(self, iterator: Iterable[Any], *args: Any, **options: Any) -> dict[str, Any]:
        self.num_loops += 1
        return {**super().train_epoch(iterator, *args, **options), "num_loops": self.num_loops}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.compute(batch)
        self.optimizer.step()
        self.scheduler.step()
        self.at(BETWEEN)
        self.at(IN_EXCHANGE)
        loss = self.compute(batch)
        self.optimizer.step()
        return {"loss": loss.detach()}


def lightning_operator() -> type[TrainingOperator]:
    """An operator that trains a module with two optimizers by hand."""
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        operator: Any

        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.first, self.second = line(), line()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.first, self.second)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for number, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                output = torch.tanh(self.first(batch[0])) + self.second(batch[0])
                loss = torch.nn.functional.mse_loss(output, batch[1])
                if number:
                    self.operator.at(BETWEEN)
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
    "own loop": lambda: OwnLoop,
    "stock loop inside": lambda: AroundStockLoop,
    "lightning by hand": lightning_operator,
}


def trainer_of(program: str, folder: Path, num_workers: int, **options: Any) -> TorchTrainer:
    """A trainer for one of the programs."""
    config = {"folder": str(folder), "noise_dim": NUM_FEATURES, "seed": 0, "lr": 0.002, **options.pop("config", {})}
    return TorchTrainer(
        training_operator_cls=PROGRAMS[program](),
        num_workers=num_workers,
        config=config,
        **{"split_batches": True, "scheduler_step_freq": "manual", **options},
    )


def weights_of_first(trainer: TorchTrainer) -> list[float]:
    """All parameters of rank 0, without waiting for new workers."""
    models = trainer.state_dict()["models"]
    return [number for model in models for each in model.values() for number in each.flatten().tolist()]
