"""Global batches for training functions that continue in place after a worker is lost.

A global batch has the samples of one step across all ranks. It is divided among the ranks of the current group. A
loader repeats failed batches with the remaining workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from raysgd.core.arrays.division import Division
from raysgd.core.engine.shared.types import World
from raysgd.torch.data.sample_order import Indices, SamplerOrder
from raysgd.train._torch.global_steps import GlobalSteps
from raysgd.train._worker.shards import StreamPart


class DrawnSampler(DistributedSampler[Any]):
    """Gives each rank its shard of another sampler's indices. That sampler must draw the same indices on all ranks.

    Args:
        sampler: Sampler that draws the indices.
        world: This worker's rank and the number of workers.
        exact: True to repeat no samples. The first ranks may then have one more sample.
    """

    def __init__(self, sampler: Any, world: World, exact: bool) -> None:
        super().__init__(sampler, num_replicas=world.size, rank=world.rank)
        self._order = SamplerOrder(sampler)
        self._multiple = 1 if exact else world.size
        self.total_size = self._with_repeats(len(sampler))
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def drawn(self) -> Indices:
        """Return the indices that the wrapped sampler draws in this epoch."""
        return self._order.indices(self.seed, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        drawn = self.drawn()
        return islice(cycle(drawn), self.rank, self._with_repeats(len(drawn)), self.num_replicas)

    def _with_repeats(self, num_samples: int) -> int:
        return num_samples + -num_samples % self._multiple


class GlobalBatches(Sampler[list[Any]]):
    """Yields a rank's part of each global batch. `start_at` sets the rank and the first global batch.

    Args:
        sampler: Sampler that determines the order of the samples.
        size: Number of samples in a global batch.
        drop_last: True to omit a smaller last global batch.

    Attributes:
        size: Number of samples in a global batch.
        consumed: Always 0, because a pass over a dataset does not start in the middle. See `GlobalStream`.
    """

    consumed = 0

    def __init__(self, sampler: DrawnSampler, size: int, drop_last: bool) -> None:
        self._sampler, self.size, self._drop_last = sampler, size, drop_last
        self._order: Indices = ()
        self._first, self._world = 0, World(0, 1)

    def __len__(self) -> int:
        return self._num_of(len(self._sampler))

    def _num_of(self, num_samples: int) -> int:
        return num_samples // self.size if self._drop_last else -(-num_samples // self.size)

    def draw(self) -> int:
        """Choose the samples of a pass and their order, and return the pass's number of global batches."""
        self._order = self._sampler.drawn()
        return self._num_of(len(self._order))

    def start_at(self, first: int, world: World) -> None:
        """Start the next iteration at global batch `first`, divided for this rank and number of workers."""
        self._first, self._world = first, world

    def count_given(self, num_given: int) -> None:
        """Do nothing. Loaders of datasets do not track a position."""

    def end_pass(self) -> None:
        """Do nothing. The function sets the next epoch."""

    def weight(self, number: int, world: World) -> float:
        """Return this rank's fraction of a global batch, times the number of ranks."""
        num_samples = min(self.size, len(self._order) - number * self.size)
        return len(range(world.rank, num_samples, world.size)) * world.size / num_samples

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts(self._order, self._first, self._world)

    def _parts(self, order: Indices, first: int, world: World) -> Iterator[list[Any]]:
        for number in range(first, self._num_of(len(order))):
            joint = list(order[number * self.size : (number + 1) * self.size])
            # a rank without samples repeats another rank's sample with weight 0
            yield joint[world.rank :: world.size] or joint[:1]


class GlobalStream:
    """This rank's batches of a stream whose rows are counted in advance. Used like `GlobalBatches`.

    It also acts as the loader's sampler. Each pass advances to the next epoch, and a position is a number of rows.

    Args:
        part: The worker's shard of the stream.

    Attributes:
        size: Number of rows in a global batch.
        consumed: Number of rows that were used before the first global batch of this pass.
    """

    def __init__(self, part: StreamPart) -> None:
        self._part = part
        self._num_rows, self.size = part.sizes
        self.sampler = self.batch_sampler = self
        self.consumed = 0
        self._first, self._world = 0, World(0, 1)

    def __len__(self) -> int:
        return len(self._part)

    def draw(self) -> int:
        """Start a pass over the remaining rows of the epoch, and return its number of global batches."""
        self.consumed = self._part.consumed
        return -(-(self._num_rows - self.consumed) // self.size)

    def start_at(self, first: int, world: World) -> None:
        """Start the next iteration at global batch `first`, divided for this rank and number of workers."""
        self._first, self._world = first, world

    def count_given(self, num_given: int) -> None:
        """Set the position to the end of the first `num_given` global batches."""
        self._part.consumed = min(self._num_rows, self.consumed + num_given * self.size)

    def end_pass(self) -> None:
        """Advance to the next epoch."""
        self.set_epoch(self.epoch + 1)

    def weight(self, number: int, world: World) -> float:
        """Return this rank's fraction of a global batch, times the number of ranks."""
        num_rows = min(self.size, self._num_rows - self.consumed - number * self.size)
        return Division(self.size, world.size).counts(num_rows)[world.rank] * world.size / num_rows

    def __iter__(self) -> Iterator[Any]:
        return self._part.batches_of(self._world, self.consumed + self._first * self.size)

    @property
    def epoch(self) -> int:
        """The stream's current epoch."""
        return self._part.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the stream's epoch."""
        self._part.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream."""
        return self._part.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position in the stream."""
        self._part.load_state_dict(state)


class RepeatingLoader(DataLoader[Any]):
    """Wraps a loader over global batches and repeats batches that fail. Other attributes come from the wrapped loader.

    Between two batches it waits until the group is complete. Meanwhile, survivors of a failure form a new group, and
    new workers step in.

    Args:
        loader: The loader to wrap.
        steps: Guards the optimizer steps on the loader's batches and reports whether a batch counts.

    Attributes:
        is_open: True while the function is in the middle of a training pass.
    """

    def __init__(self, loader: DataLoader[Any], steps: GlobalSteps) -> None:
        self.__dict__.update(loader.__dict__)
        self._loader, self._steps = loader, steps
        self._has_trained = self.is_open = False
        self._epoch = self._number = 0
        steps.number(self)

    @property
    def _global(self) -> GlobalBatches | GlobalStream:
        return self._loader.batch_sampler  # type: ignore[return-value]

    @property
    def _sampler(self) -> DistributedSampler[Any] | GlobalStream:
        return self._loader.sampler  # type: ignore[return-value]

    @property
    def epoch(self) -> int:
        """Number of training passes that have finished or were left early. It is the same on all workers.

        If a function counts its epochs by this attribute, new workers can step in while it runs. You may set it, for
        example to the value in a checkpoint.
        """
        self._steps.admit()
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def position(self) -> dict[str, Any]:
        """Return the loader's position to send to workers that step in."""
        return {
            "epoch": self._epoch,
            "order": self._sampler.epoch,
            "size": self._global.size,
            "number": self._number,
            "consumed": self._global.consumed,
            "is_open": self.is_open,
        }

    def take_over(self, position: dict[str, Any]) -> None:
        """Continue at the other workers' position."""
        self._epoch, self._number, self._global.size = position["epoch"], position["number"], position["size"]
        self._sampler.set_epoch(position["order"])
        self._global.consumed = position["consumed"]
        self._global.count_given(0)
        self._has_trained = True

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        joint = self._global
        self._number, self.is_open = 0, torch.is_grad_enabled()
        place, outcomes = self._steps.enter(self.is_open), set[str]()
        num_batches = joint.draw()
        while self._number < num_batches:
            joint.start_at(self._number, place.world)
            for batch in iter(self._loader):
                weight = joint.weight(self._number, place.world)
                joint.count_given(self._number + 1)
                # an evaluation, in which no steps follow and ranks may be at different batches
                if not torch.is_grad_enabled():
                    if weight:
                        yield batch
                    self._number += 1
                    continue
                mark = self._steps.open_batch(place, weight, self._has_trained, self._number)
                try:
                    yield batch
                except GeneratorExit:
                    has_trained = self._steps.leave_batch(mark) or "done" in outcomes
                    self._leave(has_trained, is_last=self._number + 1 == num_batches)
                    raise
                outcome = self._steps.close_batch(mark)
                self._number += outcome != "failed"
                self._note(outcome, outcomes)
                before = place
                if outcome != "seen":
                    place = self._steps.enter()
                if outcome == "failed" or place is not before:
                    break
        joint.end_pass()
        self._epoch += "done" in outcomes
        self.is_open = False

    def _leave(self, has_trained: bool, is_last: bool) -> None:
        """Count the pass that the function is leaving, unless a later pass over the same stream will continue it."""
        self.is_open, self._has_trained = False, self._has_trained or has_trained
        if has_trained and (is_last or isinstance(self._global, GlobalBatches)):
            self._global.end_pass()
            self._epoch += 1

    def _note(self, outcome: str, outcomes: set[str]) -> None:
        """Record the outcome of a batch, such as "failed", for the loader and for this pass."""
        outcomes.add(outcome)
        self._has_trained = self._has_trained or outcome != "seen"
        if {"seen", "done"} <= outcomes:
            self._steps.note_unstepped()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # `DataLoader.__setattr__` rejects some names
