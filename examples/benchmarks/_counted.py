"""A training whose model counts the uses of its samples, as an operator and as a hand-written loop.

The gradients of the samples of a global step mark a parameter. So a step that was rolled back is not counted, a step
that was repeated is counted twice, and a skipped step is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _kills import Trail
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from raysgd import TrainingOperator

NUM_WORKERS = 2
BATCH_SIZE = 16
STEPS_OF_PASS = 200
SAVE_EVERY = 50  # steps: about a second
STEP_S = 0.02
NUM_SAMPLES = BATCH_SIZE * STEPS_OF_PASS * NUM_WORKERS


class Counted(nn.Module):
    """A model that counts how often each sample was in a step that its weights include."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.used = nn.Parameter(torch.zeros(num_samples))

    def forward(self, features: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, and a zero whose gradient marks the samples."""
        picked = self.used[numbers]
        return self.net(features), (picked - picked.detach()).sum()

    @torch.no_grad()
    def count(self) -> None:
        """Add up the marks of the global step."""
        assert self.used.grad is not None
        self.used += self.used.grad.abs() > 0


def books(used: torch.Tensor, num_passes: int) -> dict[str, float]:
    """Return how many uses of samples are missing after a number of epochs, and how many there are too many."""
    missing = num_passes - used.round()
    return {"samples_lost": float(missing.clamp(min=0).sum()), "samples_twice": float((-missing).clamp(min=0).sum())}


def make_data() -> TensorDataset:
    """Return the samples of one epoch, with their indices."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, 32, generator=generator)
    return TensorDataset(features, torch.randint(10, (NUM_SAMPLES,), generator=generator), torch.arange(NUM_SAMPLES))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch; takes as long as a device would: twice as long for twice the samples."""
    features, target, numbers = batch
    logits, marks = model(features, numbers)
    time.sleep(STEP_S * len(target) / BATCH_SIZE)
    loss: torch.Tensor = nn.functional.cross_entropy(logits, target) + marks
    return loss


def optimizer_of(model: Counted) -> torch.optim.Optimizer:
    """Steps everything but the counters, whose marks it clears like gradients: an interrupted step leaves no marks."""
    books = {"params": [model.used], "lr": 0.0, "momentum": 0.0}
    return torch.optim.SGD([{"params": model.net.parameters()}, books], lr=0.01, momentum=0.9)


class CountedOperator(TrainingOperator):
    """Trains the counting model. Config: `folder` for the trails of the workers, `batch_size` of the loader."""

    def setup(self, config: dict[str, Any]) -> None:
        self.counted = Counted()
        self.model, self.optimizer = self.register(models=self.counted, optimizers=optimizer_of(self.counted))
        self.register_data(train_loader=DataLoader(make_data(), batch_size=config["batch_size"], shuffle=True))
        self.trail = Trail(config["folder"])

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if not batch_info.get("warm_up"):
            self.trail.begin(len(batch[0]))
        self.backward(loss_of(self.model, batch))
        self.optimizer_step()
        return {}

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.counted.count()


class HandWritten:
    """Trains the counting model in a hand-written loop, from a state that may have been saved.

    Args:
        rank: Rank of this process.
        folder: Folder for the trails of the workers.
        state: A value that `state` returned, in any process; None for the beginning.
    """

    def __init__(self, rank: int, folder: str, state: Any = None) -> None:
        self._data, self._counted = make_data(), Counted()
        self._optimizer, self._done = optimizer_of(self._counted), 0
        if state is not None:
            self._counted.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._done = state["done"]
        self._model, self._trail = DistributedDataParallel(self._counted), Trail(folder)
        self._sampler: DistributedSampler[Any] = DistributedSampler(self._data, rank=rank, seed=0)

    @property
    def used(self) -> torch.Tensor:
        """Return the counters of the samples."""
        return self._counted.used

    def state(self) -> dict[str, Any]:
        """Return the state of the training, with its number of steps."""
        return {"model": self._counted.state_dict(), "optimizer": self._optimizer.state_dict(), "done": self._done}

    def run(
        self, num_passes: int, save: Callable[[Callable[[], Any]], None], has_to: Callable[[], bool] = lambda: False
    ) -> None:
        """Train to the end of this many epochs; call `save` with `state` at intervals, and where it is needed."""
        steps_of_pass = len(self._sampler) // BATCH_SIZE
        for number in range(self._done // steps_of_pass, num_passes):
            self._sampler.set_epoch(number)
            skipped = self._done - number * steps_of_pass
            for index, batch in enumerate(DataLoader(self._data, batch_size=BATCH_SIZE, sampler=self._sampler)):
                if index >= skipped:
                    self._step(batch)
                    if has_to() or self._done % SAVE_EVERY == 0:
                        save(self.state)

    def _step(self, batch: Any) -> None:
        self._trail.begin(len(batch[0]))
        self._optimizer.zero_grad()
        loss_of(self._model, batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._counted.count()
        self._done += 1


def write_state(path: Path, state: Any) -> None:
    """Write a file completely, or not at all."""
    partial = path.with_suffix(".part")
    torch.save(state, partial)
    partial.replace(path)
