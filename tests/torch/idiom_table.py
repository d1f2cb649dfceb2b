"""What comes of each idiom on several workers, beside the same in one process.

    python -m tests.torch.idiom_table --workers 2 3 --places "in backward" --only Gan

Runs each calm, and with a worker killed at each place of a batch, and prints the table of `docs/architecture.md`.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
import torch

from raysgd import Recovery
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.helpers.forked import forks
from tests.helpers.ray_start import patient_ray
from tests.torch.idioms import IDIOMS, NUM_STEPS, Idiom

MOST_APART = {"float64": 1e-9, "float32": 1e-5}
PLACES = ("before forward", "before backward", "in backward", "before step", "after step", "end")


@dataclass(frozen=True)
class Death:
    """Where a worker dies: the batch, the place in it, how many times this place came by in it, and the rank."""

    batch: int
    place: str
    number: int
    rank: int


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        death: The death of a worker, if one died.
        apart: How far its weights and buffers are from those of one process.
        exact: Its weights and buffers, to the last bit.
        error: What was raised.
        recovery: What followed the death of a worker.
        num_left: How many workers were there in the end.
        counts: How often each place of each batch came by, on rank 0.
    """

    death: Death | None
    apart: float
    exact: str
    error: str
    recovery: tuple[str, ...]
    num_left: int
    counts: Counter[str]

    def fault(self, idiom: type[Idiom], dtype: str) -> str:
        """Say what is wrong with it; empty where nothing is."""
        if self.error:
            is_right = idiom.refused and re.search(idiom.refused, self.error)
            return "" if is_right else f"raised: {self.error}"
        if idiom.refused and self.num_left == 1:  # the page says so: it has no other worker to be compared with
            return ""
        if idiom.unseen or self.apart <= MOST_APART[dtype]:
            return ""
        return f"silently {self.apart:.1e} apart after {self.death}"


class Laboratory:
    """A live trainer in which one idiom after the other is run.

    Args:
        num_workers: How many workers it has before one dies.
        folder: Shared by all workers.
    """

    def __init__(self, num_workers: int, folder: Path) -> None:
        self.num_workers, self._folder = num_workers, folder
        self._expected: dict[tuple[str, str], list[torch.Tensor]] = {}
        self._alone, self._trainer = self._new(1, use_local=True), self._new(num_workers)

    def _new(self, num_workers: int, **options: Any) -> TorchTrainer:
        return TorchTrainer(
            training_operator_cls=Idiom,
            num_workers=num_workers,
            num_cpus_per_worker=0.5,
            use_gpu=False,
            config=self._config("Idiom", "float64"),
            split_batches=True,
            scheduler_step_freq="manual",
            seed=3,
            recovery=Recovery(wait_for_workers=False, resize_interval_s=600.0, snapshot_every_s=0),
            **options,
        )

    def _config(self, name: str, dtype: str) -> dict[str, Any]:
        return {"idiom": name, "folder": str(self._folder), "dtype": dtype}

    def close(self) -> None:
        for trainer in (self._alone, self._trainer):
            trainer.shutdown(force=True)

    def run(self, name: str, death: Death | None = None, dtype: str = "float64") -> Outcome:
        """Run an idiom on all workers, one of which may die, and compare with one process."""
        note = self._folder / "death"
        note.unlink(missing_ok=True)
        trainer, events = self._trainer, controller_of(self._trainer).history.events
        error, apart, exact, counts, num_before = "", math.nan, "", Counter[str](), len(events)
        num_left = self.num_workers
        try:
            expected = self._of_one_process(name, dtype)
            grow_back(trainer, self.num_workers)
            trainer.reset_config(self._config(name, dtype))
            assert trainer.num_workers == self.num_workers, f"only {trainer.num_workers} workers came"
            num_before = len(events)
            if death is not None:
                note.write_text(json.dumps([death.batch, death.place, death.number, death.rank]))
            trainer.train()
            num_left = trainer.num_workers
            state = _state(trainer)
            apart, exact = _distance(state, expected), _digest(state)
            if death is None:
                counts = trainer.apply_all_operators(lambda operator: operator.step_counts)[0]
            assert not note.exists(), f"no one died: {death}"
        except AssertionError:
            raise
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        happened = tuple(event.kind for event in [*events][num_before:] if event.is_failure)
        return Outcome(death, apart, exact, error, happened, num_left, counts)

    def _of_one_process(self, name: str, dtype: str) -> list[torch.Tensor]:
        if (name, dtype) not in self._expected:
            self._alone.reset_config(self._config(name, dtype))
            self._alone.train()
            self._expected[name, dtype] = _state(self._alone)
        return self._expected[name, dtype]


def grow_back(trainer: TorchTrainer, num_workers: int) -> None:
    """Let new workers join while those that are left train the same: with another config all would start again."""
    if trainer.num_workers < num_workers:
        trainer.load_state_dict(trainer.state_dict())


def _state(trainer: TorchTrainer) -> list[torch.Tensor]:
    return [copy.deepcopy(each) for model in trainer.state_dict()["models"] for each in model.values()]


def _digest(state: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in state)).hexdigest()[:16]


def _distance(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    pairs = ((one.double(), other.double()) for one, other in zip(found, expected, strict=True))
    most = [((one - other).abs() / other.abs().clamp(min=1)).max().item() for one, other in pairs]
    return math.inf if any(map(math.isnan, most)) else max(most)


def deaths(name: str, num_workers: int, counts: Counter[str], places: Sequence[str], seed: int) -> list[Death]:
    """Return a death at each place of a batch; chance says in which batch, and at which of the times in it."""
    chosen = []
    for number, place in enumerate(places):
        chance = random.Random(f"{seed} {name} {num_workers} {place}")
        batches = [int(key.split()[0]) for key in counts if key.endswith(f" {place}")]
        if counts and not batches:
            continue
        batch = chance.choice(batches or range(NUM_STEPS))
        times = max(1, counts[f"{batch} {place}"])
        chosen.append(Death(batch, place, chance.randint(1, times), (number + seed) % num_workers))
    return chosen


def cell(outcomes: Sequence[Outcome], idiom: type[Idiom], dtype: str) -> str:
    """Return in words what came of the runs of an idiom."""
    faults = [each.fault(idiom, dtype) for each in outcomes]
    if any(faults):
        return "; ".join(filter(None, faults))
    refusals = [each.error for each in outcomes if each.error]
    if refusals:
        found = re.search(idiom.refused, refusals[0])
        return f"{'' if len(refusals) == len(outcomes) else 'equal or '}refused: {found and found[0]}"
    if any(each.apart > MOST_APART[dtype] for each in outcomes):
        return "not seen"
    kinds = Counter(kind for each in outcomes for kind in each.recovery)
    return ", ".join(["equal", *(f"{count} {kind}" for kind, count in sorted(kinds.items()))])


@contextmanager
def laboratory(num_workers: int) -> Iterator[Laboratory]:
    """Have a laboratory, in a running Ray cluster."""
    with tempfile.TemporaryDirectory() as folder, shipped(Idiom.__module__, __name__):
        made = Laboratory(num_workers, Path(folder))
        try:
            yield made
        finally:
            made.close()


def run_idiom(lab: Laboratory, name: str, places: Sequence[str], seed: int, dtype: str = "float64") -> list[Outcome]:
    """Run an idiom calm, and with a death at each place; with two if it is refused calm."""
    calm = lab.run(name, dtype=dtype)
    places = places[:2] if calm.error else places  # then all workers start again each time
    return [calm, *(lab.run(name, death, dtype) for death in deaths(name, lab.num_workers, calm.counts, places, seed))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--places", nargs="*", default=list(PLACES), help="where workers die in a batch")
    parser.add_argument("--only", nargs="*", default=list(IDIOMS), help="classes of this module")
    parser.add_argument("--seed", type=int, default=1, help="of all chance")
    parser.add_argument("--dtype", choices=MOST_APART, default="float64")
    arguments = parser.parse_args()
    with ray_with_forks():
        _print_table(arguments)


@contextmanager
def ray_with_forks() -> Iterator[None]:
    """Have a cluster whose workers start soon."""
    with forks() as found:
        with found.starting(), patient_ray():
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@contextmanager
def shipped(*names: str) -> Iterator[None]:
    """Inside, workers use what modules define without a path to them."""
    for name in names:
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    yield
    for name in names:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[name])


def _print_table(arguments: argparse.Namespace) -> None:
    rows: dict[str, list[str]] = {name: [] for name in arguments.only}
    for num_workers in arguments.workers:
        with laboratory(num_workers) as lab:
            for name in arguments.only:
                began = time.monotonic()
                outcomes = run_idiom(lab, name, arguments.places, arguments.seed, arguments.dtype)
                rows[name].append(cell(outcomes, IDIOMS[name], arguments.dtype))
                print(f"{time.monotonic() - began:5.1f} s {num_workers} {name}: {rows[name][-1]}", flush=True)
                for each in outcomes:
                    print(each.death, each.apart, each.recovery, each.error[:600])
    print(f"| idiom | {' | '.join(f'{each} workers' for each in arguments.workers)} |")
    print("|---" * (len(arguments.workers) + 1) + "|")
    for name, cells in rows.items():
        print(f"| {IDIOMS[name].words} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
