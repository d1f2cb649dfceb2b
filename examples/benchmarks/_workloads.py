"""The models and data of the benchmarks, a hand-written loop, and operators for the same training.

All data is random and created on the spot. The sizes cover the extremes: a step of `mlp_tiny` costs little more than
its Python calls and one all-reduce; a step of `mlp_large` is arithmetic and 10 MB of gradients.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from raysgd import TrainingOperator
from raysgd.core.state.state_codec import StateEncoder

if TYPE_CHECKING:  # workers load this module without a trainer
    from raysgd import TorchTrainer

NUM_CLASSES = 10
LEARNING_RATE = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class Workload:
    """A model, and the amount of data to train it on.

    Attributes:
        name: Name in the tables.
        make_model: Creates the model.
        input_shape: Shape of one sample.
        batch_size: Samples of one worker in one step.
        num_steps: Steps per epoch.
    """

    name: str
    make_model: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch_size: int
    num_steps: int

    def with_steps(self, num_steps: int) -> Workload:
        """Return the same workload with epochs of another length."""
        return replace(self, num_steps=num_steps)

    def model(self) -> nn.Module:
        """Create the model, with the same weights in every process."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return self.make_model()

    def dataset(self, world_size: int) -> TensorDataset:
        """Create samples for one epoch of all workers, the same in every process."""
        generator = torch.Generator().manual_seed(1)
        num_samples = self.batch_size * self.num_steps * world_size
        features = torch.randn(num_samples, *self.input_shape, generator=generator)
        return TensorDataset(features, torch.randint(NUM_CLASSES, (num_samples,), generator=generator))

    def num_samples(self, world_size: int) -> int:
        """Return the number of samples per epoch of all workers."""
        return self.batch_size * self.num_steps * world_size


def _mlp_tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))


def _mlp_large() -> nn.Module:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), *hidden, nn.Linear(1024, NUM_CLASSES))


def _cnn_tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES),
    )  # fmt: skip


def _cnn_large() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES),
    )  # fmt: skip


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp_tiny", _mlp_tiny, (32,), batch_size=32, num_steps=200),
        Workload("cnn_tiny", _cnn_tiny, (1, 12, 12), batch_size=16, num_steps=150),
        Workload("mlp_large", _mlp_large, (512,), batch_size=256, num_steps=12),
        Workload("cnn_large", _cnn_large, (3, 32, 32), batch_size=64, num_steps=10),
    )
}


def _square_layers(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


STATES = {
    workload.name: workload
    for workload in (
        # 100 MiB of weights; the optimizer's momentum has the same size.
        Workload("large_state", functools.partial(_square_layers, 2560), (2560,), batch_size=1, num_steps=4),
        # 5 MiB of weights, and 5 MiB of momentum.
        Workload("medium_state", functools.partial(_square_layers, 572), (572,), batch_size=32, num_steps=20),
        Workload("recovery", _mlp_large, (512,), batch_size=128, num_steps=90),
        Workload("recovery_tiny", _mlp_tiny, (32,), batch_size=32, num_steps=90),
        Workload("small_state", functools.partial(_square_layers, 64), (64,), batch_size=1, num_steps=4),
    )
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all contenders."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class HandWritten:
    """Distributed training with PyTorch only.

    Args:
        workload: Workload to train.
        rank: Rank of this process in the default process group.
        world_size: Size of the group.
        model: Model of which to train a copy; by default a new model.
    """

    def __init__(self, workload: Workload, rank: int, world_size: int, model: nn.Module | None = None) -> None:
        model = workload.model() if model is None else copy.deepcopy(model)
        self.model = DistributedDataParallel(model) if world_size > 1 else model
        self.optimizer = sgd(self.model)
        self.criterion = nn.CrossEntropyLoss()
        dataset = workload.dataset(world_size)
        self.sampler: DistributedSampler[Any] = DistributedSampler(dataset, world_size, rank, shuffle=True)
        self.loader = DataLoader(dataset, batch_size=workload.batch_size, sampler=self.sampler)
        self.epoch = 0

    def train_epoch(self) -> torch.Tensor:
        """Train one epoch; return the sum of this rank's losses, and their number of samples."""
        self.model.train()
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        loss_sum, num_samples = torch.zeros(()), 0
        for features, target in self.loader:
            loss = self.criterion(self.model(features), target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach() * len(target)
            num_samples += len(target)
        return torch.stack([loss_sum, torch.tensor(float(num_samples))])

    def train_epoch_of_all(self) -> float:
        """Train one epoch; return the mean loss over all ranks' samples, which costs one small all-reduce."""
        totals = self.train_epoch()
        if dist.is_initialized():
            dist.all_reduce(totals)
        loss_sum, num_samples = totals.tolist()
        return float(loss_sum / num_samples)

    def timed_epoch(self) -> float:
        """Return the seconds of an epoch of all ranks, which begin together."""
        meet()
        began = time.perf_counter()
        self.train_epoch_of_all()
        return time.perf_counter() - began


def meet() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


class StockOperator(TrainingOperator):
    """The same training with raysgd's stock loop."""

    def setup(self, config: dict[str, Any]) -> None:
        workload = workload_of(config)
        model = workload.model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=self.make_optimizer(model), criterion=nn.CrossEntropyLoss()
        )
        dataset = self.make_dataset(workload, config["world_size"])
        batch_size = config.get("batch_size", workload.batch_size)
        self.register_data(train_loader=DataLoader(dataset, batch_size=batch_size, shuffle=True))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """How to train it."""
        return sgd(model)

    def make_dataset(self, workload: Workload, world_size: int) -> TensorDataset:
        """Return the training data."""
        return workload.dataset(world_size)


@functools.cache
def kept_dataset(name: str, num_steps: int, world_size: int) -> TensorDataset:
    """Return the data of one of `STATES`, created once in each process: this module stays when a class is edited."""
    return STATES[name].with_steps(num_steps).dataset(world_size)


class TimedOperator(StockOperator):
    """Also reports, as `loop_s`, how many seconds the loop took, from its first instruction to its last."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        # Set on the object instead of overridden in the class: raysgd checks for overrides to decide whether
        # gradients need a communication hook, and the stock loop needs none.
        self.train_epoch = self._timed(self.train_epoch)  # type: ignore[method-assign]

    def before_loop(self) -> None:
        """Called right before the timing starts."""

    def _timed(self, loop: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(loop)
        def timed(*args: Any, **keywords: Any) -> dict[str, Any]:
            self.before_loop()
            began = time.perf_counter()
            result = loop(*args, **keywords)
            result["loop_s"] = time.perf_counter() - began
            return result

        timed.__func__ = TrainingOperator.train_epoch  # type: ignore[attr-defined]  # or it counted as a user's loop
        return timed


def await_snapshot(trainer: TorchTrainer) -> None:
    """Wait until the snapshot of the last call has left the workers, so that it does not slow down the next call."""
    trainer.state_dict()


def step_s(trainer: TorchTrainer, num_steps: int | None = None) -> float:
    """Return the seconds of a step in the loop of a `TimedOperator`, on the slowest worker, without snapshots."""
    await_snapshot(trainer)
    results = trainer.train(num_steps=num_steps, reduce_results=False)
    return max(result["loop_s"] / result["batch_count"] for result in results)


class StampedOperator(StockOperator):
    """Also reports when its first step ended. It overrides only the lowest method."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if not self.global_step:
            stamp(Path(self.config["stamps"]), self.world_rank)


def workload_of(config: Mapping[str, Any]) -> Workload:
    """Return the workload that a trainer's config names."""
    workload = {**WORKLOADS, **STATES}[config["workload"]]
    return workload.with_steps(config["num_steps"]) if config.get("num_steps") else workload


def config_of(workload: Workload, world_size: int, **more: Any) -> dict[str, Any]:
    """Return a trainer's config that names `workload`."""
    return {"workload": workload.name, "num_steps": workload.num_steps, "world_size": world_size, **more}


_copies: list[tuple[float, float]] = []


def watch_copies() -> None:
    """In this process, record in `copies_made` when each copy of the state begins and how long it takes."""
    original = StateEncoder.encode

    @functools.wraps(original)
    def timed(self: StateEncoder, state: Any) -> Any:
        began = time.perf_counter()
        content = original(self, state)
        _copies.append((began, time.perf_counter() - began))
        return content

    StateEncoder.encode = timed  # type: ignore[method-assign]


def copies_made() -> list[tuple[float, float]]:
    """Return the begin, on the machine's clock, and the seconds of each copy of the state so far."""
    return list(_copies)


def stamp(folder: Path, rank: int) -> None:
    """Write the time of the machine's monotonic clock under this rank's name."""
    now = time.monotonic()
    (folder / f"rank-{rank}").write_text(repr(now))


def last_stamp(folder: Path, world_size: int) -> float:
    """Return when the last of all ranks wrote its stamp."""
    return max(float((folder / f"rank-{rank}").read_text()) for rank in range(world_size))
