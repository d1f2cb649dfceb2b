"""Joint batches: the samples of a step of all ranks, divided over as many ranks as there are at the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import Sampler

from raysgd.arrays.division import Division
from raysgd.engine.shared.types import World
from raysgd.torch.data.sample_order import Indices
from raysgd.train._worker.stream_part import StreamPart


class Draws(Protocol):
    """The numbers that decide the order of the samples."""

    def __len__(self) -> int: ...

    def drawn(self) -> Indices:
        """Return the samples of a pass, in order."""


class JointBatches(Sampler[list[Any]]):
    """Gives a rank its part of each joint batch; which rank, and from where on, `begin` says.

    Args:
        sampler: Decides the order.
        size: The samples of a joint batch.
        drop_last: Whether a last one with fewer is left out.

    Attributes:
        size: As above.
        consumed: The samples of a pass that a loaded position has used: none.
    """

    consumed = 0

    def __init__(self, sampler: Draws, size: int, drop_last: bool) -> None:
        self._sampler, self.size, self._drop_last = sampler, size, drop_last
        self._order: Indices = ()
        self._first, self._world = 0, World(0, 1)

    def __len__(self) -> int:
        return self._num_of(len(self._sampler))

    def _num_of(self, num_samples: int) -> int:
        return num_samples // self.size if self._drop_last else -(-num_samples // self.size)

    def draw(self) -> int:
        """Draws the samples of a pass; returns the number of its joint batches."""
        self._order = self._sampler.drawn()
        return self._num_of(len(self._order))

    def begin(self, first: int, world: World) -> None:
        """Returns what is iterated over next begins with the joint batch `first`, divided for this place."""
        self._first, self._world = first, world

    def note(self, num_given: int) -> None:
        """So many joint batches were handed out: no position is kept."""

    def end(self) -> None:
        """The pass is over: the function says which one follows."""

    def weight(self, number: int, world: World) -> float:
        """Return the part that a rank has of a joint batch, times the number of ranks."""
        num_samples = min(self.size, len(self._order) - number * self.size)
        return len(range(world.rank, num_samples, world.size)) * world.size / num_samples

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts(self._order, self._first, self._world)

    def _parts(self, order: Indices, first: int, world: World) -> Iterator[list[Any]]:
        for number in range(first, self._num_of(len(order))):
            joint = list(order[number * self.size : (number + 1) * self.size])
            yield joint[world.rank :: world.size] or joint[:1]  # which then has the weight 0


class JointStream:
    """The batches of a rank in a stream whose rows are counted before they are read; otherwise as `JointBatches`.

    It is its own sampler: epochs follow each other, and a position counts rows.

    Args:
        part: The part of a worker.

    Attributes:
        size: The rows of a joint batch.
        consumed: The rows that were used before the first of the joint batches that are counted.
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
        """Begins with the rows that are left of the epoch; returns the number of joint batches."""
        self.consumed = self._part.consumed
        return -(-(self._num_rows - self.consumed) // self.size)

    def begin(self, first: int, world: World) -> None:
        """As that of `JointBatches`."""
        self._first, self._world = first, world

    def note(self, num_given: int) -> None:
        """So many joint batches were handed out."""
        self._part.consumed = min(self._num_rows, self.consumed + num_given * self.size)

    def end(self) -> None:
        """The epoch is over, and the next one follows."""
        self.set_epoch(self.epoch + 1)

    def weight(self, number: int, world: World) -> float:
        """Return the part that a rank has of a joint batch, times the number of ranks."""
        num_rows = min(self.size, self._num_rows - self.consumed - number * self.size)
        return Division(self.size, world.size).counts(num_rows)[world.rank] * world.size / num_rows

    def __iter__(self) -> Iterator[Any]:
        return self._part.batches_of(self._world, self.consumed + self._first * self.size)

    @property
    def epoch(self) -> int:
        """The epoch of the stream."""
        return self._part.epoch

    def set_epoch(self, epoch: int) -> None:
        """As that of the part."""
        self._part.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As that of the part."""
        return self._part.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As that of the part."""
        self._part.load_state_dict(state)
