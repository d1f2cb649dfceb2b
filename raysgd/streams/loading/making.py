"""The loading of one worker's part of the joint batches: what is ordered, and who makes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from raysgd.exceptions import StreamError
from raysgd.streams.dealing import LaneSlice
from raysgd.streams.lanes import LanePosition
from raysgd.streams.open_lanes import OpenLanes
from raysgd.streams.stream_pass import Place, StreamPass


class Collate(Protocol):
    """Makes batches of rows."""

    def __call__(self, rows: list[Any]) -> Any:
        """Return a batch of some rows."""

    def join(self, batches: list[Any]) -> Any:
        """Return one batch of one or several, whose rows are all different."""

    def begin_process(self) -> None:
        """Called first in a process that makes batches."""


class BatchOrder(NamedTuple):
    """An order for batches of one joint batch.

    Attributes:
        batches: For each batch that the worker takes of it the rows of lanes; nothing for a batch without any.
        counts: How many rows of each lane the joint batch has.
        places: Where each lane is ahead of it.
        num_seen: How far to look in the watched lanes behind it; 0 for not at all.
    """

    batches: Sequence[Sequence[LaneSlice]]
    counts: Sequence[int]
    places: Sequence[Place]
    num_seen: int = 0


class MadeBatches(NamedTuple):
    """The outcome of an order.

    Attributes:
        batches: The batches; None for one without rows.
        found: How many rows are left in each watched lane, up to `num_seen`, and where it is.
    """

    batches: list[Any]
    found: list[tuple[int, LanePosition]]


class BatchLoader(Protocol):
    """Makes what is ordered, in the order in which it was.

    Attributes:
        num_ahead: How many joint batches to order ahead of the one that is needed.
    """

    num_ahead: int

    def order(self, order: BatchOrder) -> None:
        """Order something."""

    def receive(self) -> MadeBatches:
        """Return what became of the first order that was not answered yet."""

    def close(self) -> None:
        """Let go of what is open."""


class BatchMaker:
    """Reads lanes, and makes batches of their rows.

    Args:
        of_pass: The pass.
        watched: The lanes to look at for ends.
        collate: Makes a batch of a list of rows.
    """

    def __init__(self, of_pass: StreamPass, watched: range, collate: Callable[[list[Any]], Any]) -> None:
        self.watched = watched
        self._pass, self._collate = of_pass, collate
        self._places: Sequence[Place] = ()
        self._lanes = OpenLanes(of_pass, watched, lambda lane: of_pass.position(lane, self._places[lane]))

    def make(self, order: BatchOrder) -> MadeBatches:
        """Make the batches of an order."""
        self._places = order.places
        batches = [self._batch(wanted) if wanted else None for wanted in order.batches]
        self._lanes.end_batch(order.counts)
        num_seen = order.num_seen
        found = [self._lanes.peek(lane, num_seen) for lane in self.watched] if num_seen else []
        return MadeBatches(batches, found)

    def _batch(self, wanted: Sequence[LaneSlice]) -> Any:
        steps, rows, places = self._pass.last_steps, [], []
        for row, shard, number in (row for each in wanted for row in self._lanes.take(each)):
            rows.append(steps(row, shard, number))
            places.append(f"shard {shard!r}, row {number}")
        return collated(self._collate, rows, places)


def collated(collate: Callable[[list[Any]], Any], rows: list[Any], places: Sequence[str]) -> Any:
    """Return a batch of rows, each of which is from one of the places.

    Raises:
        StreamError: `collate` failed. It names the first row that has not the form of row 0.
    """
    try:
        return collate(rows)
    except Exception as error:
        first, forms = dict(_forms(rows[0])), [dict(_forms(row)) for row in rows]
        odd = next((number for number, each in enumerate(forms) if each != first), None)
        where = f"{places[0]}, to {places[-1]}"
        if odd is not None:
            own = forms[odd]
            field = next(name for name in {**first, **own} if first.get(name) != own.get(name))
            kinds = [each.get(field, "missing") for each in (own, first)]
            where = f"{places[odd]}: {field} is {kinds[0]}, and {kinds[1]} in {places[0]}"
        raise StreamError(f"rows do not make a batch ({where}): {type(error).__name__}: {error}") from error


def _forms(row: Any, field: str = "row") -> Iterator[tuple[str, str]]:
    """Yield each field of a row, and which kind of value it has."""
    named = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, tuple | list) else ()
    of_array = f" of shape {tuple(row.shape)} and type {row.dtype}" if hasattr(row, "shape") else ""
    of_several = f" of {len(row)}" if isinstance(row, Mapping | tuple | list) else ""
    yield f"`{field}`", f"a `{type(row).__name__}`{of_several}{of_array}"
    for name, value in named:
        yield from _forms(value, f"{field}[{name!r}]")


class LoaderInThread:
    """Makes batches when they are needed, in the thread that needs them."""

    num_ahead = 0

    def __init__(self, maker: BatchMaker) -> None:
        self._maker = maker
        self._orders: deque[BatchOrder] = deque()

    def order(self, order: BatchOrder) -> None:
        self._orders.append(order)

    def receive(self) -> MadeBatches:
        return self._maker.make(self._orders.popleft())

    def close(self) -> None:
        """Nothing is open that does not close by itself."""
