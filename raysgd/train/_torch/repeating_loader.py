"""Loaders over global batches, for training functions that continue after a worker is lost (`elastic=True`).

A global batch has the samples of one step across all ranks. Its samples are divided among the current ranks. If a
worker is lost during a batch, the batch is repeated with the remaining workers.
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
    """Gives each rank its shard of the indices that the user's sampler draws.

    Args:
        sampler: The user's sampler. With the same seed, it must draw the same indices on all ranks.
        world: This worker's rank and the number of workers.
        exact: True to repeat no samples. The first ranks may then have one more sample than the other ranks.
    """

    def __init__(self, sampler: Any, world: World, exact: bool) -> None:
        super().__init__(sampler, num_replicas=world.size, rank=world.rank)
        self._order = SamplerOrder(sampler)
        self._multiple = 1 if exact else world.size
        self.total_size = self._with_repeats(len(sampler))
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def drawn(self) -> Indices:
        """Return all indices that the user's sampler draws in this epoch."""
        return self._order.indices(self.seed, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        drawn = self.drawn()
        return islice(cycle(drawn), self.rank, self._with_repeats(len(drawn)), self.num_replicas)

    def _with_repeats(self, num_samples: int) -> int:
        return num_samples + -num_samples % self._multiple


class GlobalBatches(Sampler[list[Any]]):
    """A batch sampler that yields one rank's part of each global batch.

    `start_at` sets the rank, the number of ranks and the first global batch.

    Args:
        sampler: Sampler that determines the order of the samples.
        size: Number of samples in a global batch.
        drop_last: True to omit a smaller last global batch.

    Attributes:
        size: Number of samples in a global batch.
        consumed: Number of samples before the first global batch of a pass. Always 0, because a pass over a dataset
            starts at its beginning. In a `GlobalStream`, a pass may start later.
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
        """Choose the samples of the next pass and their order. Return the number of global batches in the pass."""
        self._order = self._sampler.drawn()
        return self._num_of(len(self._order))

    def start_at(self, first: int, world: World) -> None:
        """Set the global batch at which the next iteration starts, and the rank whose parts it yields.

        Args:
            first: Index of the first global batch.
            world: The rank, and the number of workers.
        """
        self._first, self._world = first, world

    def count_given(self, num_given: int) -> None:
        """Do nothing, because the position in a dataset is not saved."""

    def end_pass(self) -> None:
        """Do nothing, because the training function sets the next epoch itself, with `loader.sampler.set_epoch`."""

    def weight(self, number: int, world: World) -> float:
        """Return the weight of a rank's gradients: its fraction of a global batch, times the number of ranks.

        Args:
            number: Index of the global batch.
            world: The rank, and the number of ranks.
        """
        num_samples = min(self.size, len(self._order) - number * self.size)
        return len(range(world.rank, num_samples, world.size)) * world.size / num_samples

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts(self._order, self._first, self._world)

    def _parts(self, order: Indices, first: int, world: World) -> Iterator[list[Any]]:
        for number in range(first, self._num_of(len(order))):
            joint = list(order[number * self.size : (number + 1) * self.size])
            # A rank without samples gets a sample of another rank, which counts with weight 0.
            yield joint[world.rank :: world.size] or joint[:1]


class GlobalStream:
    """This rank's batches of a stream whose rows are counted in advance. It has the methods of `GlobalBatches`.

    It also serves as the loader's sampler, so `loader.sampler.set_epoch` sets the stream's epoch. At its end, a pass
    advances to the next epoch. The position in an epoch is the number of rows that all workers together have used.

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
        """Set the global batch at which the next iteration starts, and the rank whose parts it yields.

        Args:
            first: Index of the first global batch.
            world: The rank, and the number of workers.
        """
        self._first, self._world = first, world

    def count_given(self, num_given: int) -> None:
        """Set the stream's position to the end of the first `num_given` global batches of this pass."""
        self._part.consumed = min(self._num_rows, self.consumed + num_given * self.size)

    def end_pass(self) -> None:
        """Advance the stream to its next epoch."""
        self.set_epoch(self.epoch + 1)

    def weight(self, number: int, world: World) -> float:
        """Return the weight of a rank's gradients: its fraction of a global batch, times the number of ranks.

        Args:
            number: Index of the global batch.
            world: The rank, and the number of ranks.
        """
        num_rows = min(self.size, self._num_rows - self.consumed - number * self.size)
        return Division(self.size, world.size).counts(num_rows)[world.rank] * world.size / num_rows

    def __iter__(self) -> Iterator[Any]:
        return self._part.batches_of(self._world, self.consumed + self._first * self.size)

    @property
    def epoch(self) -> int:
        """The stream's current epoch."""
        return self._part.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the stream's epoch, which determines the order of the rows. A new epoch starts at its first row."""
        self._part.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, for a checkpoint."""
        return self._part.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position in the stream that `state_dict` returned."""
        self._part.load_state_dict(state)


class RepeatingLoader(DataLoader[Any]):
    """Wraps a loader over global batches, and repeats a batch if a worker was lost while the batch was processed.

    After a worker was lost, the loader waits before the next batch until the remaining workers have formed a new group.
    New workers also join between two batches. Other attributes come from the wrapped loader.

    Args:
        loader: The loader to wrap.
        steps: Object that decides whether an optimizer step on one of the loader's batches counts.

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
        """Number of passes in which the function has trained. It is equal on all workers.

        A pass counts when it ends, even if the function leaves it early. But if the function leaves a pass over a
        stream before the last batch, the pass does not count, because the next pass continues there.

        New workers can join a running function only if the function counts its epochs by this attribute. You may set
        the attribute, for example to a value from a checkpoint.
        """
        self._steps.admit()
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def position(self) -> dict[str, Any]:
        """Return the loader's position, which is sent to new workers."""
        return {
            "epoch": self._epoch,
            "order": self._sampler.epoch,
            "size": self._global.size,
            "number": self._number,
            "consumed": self._global.consumed,
            "is_open": self.is_open,
        }

    def take_over(self, position: dict[str, Any]) -> None:
        """Continue at the other workers' position. Called in a new worker.

        Args:
            position: The result of `position` in another worker.
        """
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
                # Under `torch.no_grad()`, the function evaluates: no steps follow, and ranks need not stay together.
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
        """When the function leaves a pass early, count the pass as an epoch if the function has taken a step in it.

        A pass over a stream counts only if the function leaves it during the last batch. Otherwise, the next pass
        continues where this pass stopped.

        Args:
            has_trained: True if the function has taken a step in the pass.
            is_last: True if the function leaves the pass during its last batch.
        """
        self.is_open, self._has_trained = False, self._has_trained or has_trained
        if has_trained and (is_last or isinstance(self._global, GlobalBatches)):
            self._global.end_pass()
            self._epoch += 1

    def _note(self, outcome: str, outcomes: set[str]) -> None:
        """Record the outcome of a batch: "done", "failed", or "seen" if no optimizer step was taken on the batch.

        Args:
            outcome: The outcome of the batch.
            outcomes: The outcomes of all batches in this pass, to which `outcome` is added.
        """
        outcomes.add(outcome)
        self._has_trained = self._has_trained or outcome != "seen"
        if {"seen", "done"} <= outcomes:
            self._steps.note_unstepped()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # not `DataLoader.__setattr__`, which rejects some names
