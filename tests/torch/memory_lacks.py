"""Trainings in which random ranks run out of memory: no process ends, and the weights are those of a run without.

`python -m tests.torch.memory_lacks --times 100` raises that many errors; `--seed` draws others. Each call to `train`
has two errors, of random ranks, in random steps, at random places of the steps.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.parallel.copies import TensorCopies

NUM_STEPS, GLOBAL_BATCH, NUM_FEATURES = 6, 24, 3
PLACES = ("forward", "backward", "copies", "optimizer")
Lack = tuple[int, str, int]  # the step of the epoch, the place and the rank


class ShortAdam(torch.optim.Adam):
    """Runs out of memory after it has changed a parameter."""

    operator: ClassVar[Any] = None

    def step(self, closure: Any = None) -> Any:
        if self.operator is not None and self.operator.is_due("optimizer"):
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            self.operator.run_out()
        return super().step(closure)


class Short(TrainingOperator):
    """Runs out of memory where a file in a folder says: `step place rank`, the step of the epoch."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.epoch_began, self.raised_at, self.delays = 0, 0.0, list[float]()
        layers = [torch.nn.Linear(NUM_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
        model = torch.nn.Sequential(*layers).double()
        model.register_buffer("copied", torch.zeros(1))  # something to copy before each batch
        optimizer = ShortAdam(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        ShortAdam.operator = self
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(NUM_STEPS * GLOBAL_BATCH, NUM_FEATURES, generator=generator, dtype=torch.float64)
        data = TensorDataset(features, features.sum(1, keepdim=True))
        self.register_data(train_loader=DataLoader(data, batch_size=GLOBAL_BATCH, shuffle=True))
        model[0].register_forward_pre_hook(lambda *_: self.run_out_if("forward"))
        model[2].weight.register_hook(lambda *_: self.run_out_if("backward"))
        take_copies, operator = TensorCopies.take_copies, self

        def short_copies(self: TensorCopies, tensors: list[torch.Tensor]) -> None:
            operator.run_out_if("copies")
            take_copies(self, tensors)

        if not hasattr(TensorCopies, "is_short"):
            TensorCopies.take_copies, TensorCopies.is_short = short_copies, True  # type: ignore[method-assign,attr-defined]

    def is_due(self, place: str) -> bool:
        lack = Path(self.config["folder"], f"{self.global_step % NUM_STEPS} {place} {self.world_rank}")
        if not lack.exists():
            return False
        lack.unlink()
        return True

    def run_out(self) -> None:
        self.raised_at = time.time()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def run_out_if(self, place: str) -> None:
        if self.is_due(place):
            self.run_out()

    def note_time(self) -> None:
        if self.raised_at:
            self.delays.append(time.time() - self.raised_at)
            self.raised_at = 0.0

    def train_batch(self, batch: Any, **info: Any) -> dict[str, Any]:
        result = super().train_batch(batch, **info)
        self.note_time()
        return result


class Stock(Short):
    """Trains with the library's own methods, beside what a test measures."""


class OwnBatch(Short):
    """Has its own `train_batch`."""

    def train_batch(self, batch: Any) -> dict[str, Any]:  # type: ignore[override]
        features, target = batch
        loss = self.criterion(self.model(features), target)
        self.backward(loss)
        self.optimizer_step()
        self.note_time()
        return {"train_loss": loss.item()}


class OwnLoop(Short):
    """Has its own `train_epoch`."""

    resumes_epochs = True

    def train_epoch(self, iterator: Iterable[Any]) -> dict[str, Any]:  # type: ignore[override]
        for features, target in iterator:
            self.backward(self.criterion(self.model(features), target))
            self.optimizer_step()
            self.global_step += self._raysgd.sync.leg.plan.ends_global_batch
            self.note_time()
        return {}


OPERATORS = (Stock, OwnBatch, OwnLoop)


def weights(trainer: TorchTrainer) -> torch.Tensor:
    return torch.cat([each.flatten() for each in trainer.state_dict()["models"][0].values()])


def processes(trainer: TorchTrainer) -> set[int]:
    return {each.pid for each in trainer.status().workers}


def delays(operator: Short) -> list[float]:
    """For `apply_all_operators`: seconds from an error to the next step of the rank."""
    found, operator.delays = operator.delays, []
    return found


def run(
    operator_cls: type[Short], num_workers: int, lacks: Sequence[Sequence[Lack]], micro_batch_size: Any
) -> tuple[torch.Tensor, list[float], list[int | None]]:
    """Train an epoch for each of `lacks`, the errors of the epoch.

    Returns:
        The weights, the seconds until the next step of the rank, and the size of batches after each epoch.
    """
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"num_workers": num_workers, "num_cpus_per_worker": 0.2, "use_gpu": False}
        trainer = TorchTrainer(
            operator_cls,
            config={"folder": folder},
            seed=1,
            split_batches=True,
            micro_batch_size=micro_batch_size,
            **options,
        )
        with trainer:
            seconds, sizes, before = list[float](), list[int | None](), processes(trainer)
            for of_epoch in lacks:
                for lack in of_epoch:
                    Path(folder, " ".join(map(str, lack))).touch()
                trainer.train(max_retries=0)  # it costs none
                largest = trainer._life.largest_batch
                sizes.append(None if largest is None else largest.size)
                if largest is not None and largest.size is not None:
                    largest.size = GLOBAL_BATCH  # from whole shares again
                left = [each.name for each in Path(folder).iterdir()]
                assert not left, f"{left} was not raised"
                seconds += [each for found in trainer.apply_all_operators(delays) for each in found]
            assert processes(trainer) == before, "a process was replaced"
            return weights(trainer), seconds, sizes


def drawn(rng: random.Random, num_workers: int, number: int) -> list[list[Lack]]:
    """Draw errors of some epochs. An epoch has two, because half of a share of 6 samples can be halved once more.

    None is of the optimizer of one rank in two steps in a row, because such a rank gives up.
    """
    found, before = [list[Lack]() for _ in range(number)], (-1, "", 0)
    for epoch, lacks in enumerate(found):
        for step in sorted(rng.sample(range(NUM_STEPS), 2)):
            place, rank, at = rng.choice(PLACES), rng.randrange(num_workers), epoch * NUM_STEPS + step
            place = "forward" if before == (at - 1, "optimizer", rank) else place
            before = at, place, rank
            lacks.append((step, place, rank))
    return found


@cache
def undisturbed(operator_cls: type[Short], num_workers: int, num_epochs: int) -> torch.Tensor:
    """Return the weights of a training in which no memory lacks."""
    return run(operator_cls, num_workers, [[]] * num_epochs, None)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=50, help="calls of one training, with two errors each")
    chosen = parser.parse_args()
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    rng, number, all_seconds = random.Random(chosen.seed), 0, list[float]()
    for operator_cls, num_workers in islice(cycle(product(OPERATORS, (2, 3, 4))), chosen.seed, None):
        if number >= chosen.times:
            break
        lacks = drawn(rng, num_workers, min(chosen.calls, -(-(chosen.times - number) // 2)))
        found, seconds, _ = run(operator_cls, num_workers, lacks, "auto")
        expected = undisturbed(operator_cls, num_workers, len(lacks))
        error = (found - expected).abs().max().item()
        number, all_seconds = number + 2 * len(lacks), all_seconds + seconds
        print(
            f"{number} errors: {operator_cls.__name__} on {num_workers} workers, weights differ by {error:.1e}, next "
            f"step after {median(seconds):.2f} s (at most {max(seconds):.2f})",
            flush=True,
        )
        assert error < 1e-9, f"{operator_cls.__name__}, {num_workers} workers, {lacks}"
    print(f"{number} errors; next step after {median(all_seconds):.2f} s, at most {max(all_seconds):.2f} s")


if __name__ == "__main__":
    main()
