"""Makes one worker's batches: in the worker when they are needed, or ahead of time in loader processes.

Each loader process reads some of the worker's lanes. It is forked, so nothing of the stream has to be pickled. It holds
no state that matters: after a failure, the batches that it made in advance are made again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import select
import signal
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from raysgd.exceptions import StreamError
from raysgd.streams.lane_reader import LaneReader, Place, StreamPass
from raysgd.streams.lanes import LanePosition, LaneSlice

_NUM_NEIGHBORS = 2
_MOST_BEHIND = 4096


class Collate(Protocol):
    """Makes batches of rows."""

    def __call__(self, rows: list[Any]) -> Any:
        """Return a batch of some rows."""

    def join(self, batches: list[Any]) -> Any:
        """Combine batches with different rows into one."""

    def begin_process(self) -> None:
        """Called first in a loader process."""


class BatchOrder(NamedTuple):
    """An order for batches of one global batch.

    Attributes:
        batches: For each of the worker's batches, its rows as slices of lanes; empty for a batch without rows.
        counts: Number of rows of each lane in the global batch.
        places: Place of each lane before the global batch.
        num_seen: How far to look ahead in the watched lanes after the global batch; 0 for not at all.
    """

    batches: Sequence[Sequence[LaneSlice]]
    counts: Sequence[int]
    places: Sequence[Place]
    num_seen: int = 0


class MadeBatches(NamedTuple):
    """The answer to an order.

    Attributes:
        batches: The batches; None for one without rows.
        found: For each watched lane, the number of rows left, up to `num_seen`, and its position.
    """

    batches: list[Any]
    found: list[tuple[int, LanePosition]]


class BatchMaker:
    """Reads lanes and makes batches of their rows when they are needed. Opens a lane when a row of it is needed.

    Args:
        of_pass: The pass.
        watched: The lanes whose ends to watch. Rows of neighboring lanes are read, too: if a share ends inside a lane,
            two workers read that lane.
        collate: Makes a batch of a list of rows.

    Attributes:
        num_ahead: How many global batches to order before they are needed.
    """

    num_ahead = 0

    def __init__(self, of_pass: StreamPass, watched: range, collate: Callable[[list[Any]], Any]) -> None:
        self.watched = watched
        self._pass, self._collate = of_pass, collate
        self._places: Sequence[Place] = ()  # at the start of the present global batch
        near = range(max(0, watched.start - _NUM_NEIGHBORS), min(of_pass.num_lanes, watched.stop + _NUM_NEIGHBORS))
        self._opened = of_pass.open_shards(near)
        self._readers: dict[int, LaneReader] = {}
        self._passed: dict[int, int] = {}  # rows read of the present global batch; negative if a lane is behind
        self._orders: deque[BatchOrder] = deque()

    def order(self, order: BatchOrder) -> None:
        """Add an order. Orders are answered in the same sequence."""
        self._orders.append(order)

    def receive(self) -> MadeBatches:
        """Return the answer to the oldest open order."""
        return self.make(self._orders.popleft())

    def end_loading(self) -> None:
        """Do nothing: open shards close by themselves."""

    def make(self, order: BatchOrder) -> MadeBatches:
        """Make the batches of an order."""
        self._places = order.places
        batches = [self._batch(wanted) if wanted else None for wanted in order.batches]
        for lane in list(self._readers):
            self._passed[lane] -= order.counts[lane]
            if self._passed[lane] < -_MOST_BEHIND and lane not in self.watched:
                del self._readers[lane], self._passed[lane]  # reopening it is cheaper than reading on
        found = [self._peek(lane, order.num_seen) for lane in self.watched] if order.num_seen else []
        return MadeBatches(batches, found)

    def _batch(self, wanted: Sequence[LaneSlice]) -> Any:
        steps, rows, places = self._pass.last_steps, [], []
        for shard, number, row in self.rows(wanted):
            rows.append(steps(row, shard, number))
            places.append(f"shard {shard!r}, row {number}")
        return collated(self._collate, rows, places)

    def rows(self, wanted: Sequence[LaneSlice]) -> Iterator[tuple[str, int, Any]]:
        """Yield the shard, the number in it and the content of each of some rows, before the steps after filters."""
        for lane, start, stop in wanted:  # slices of one lane come in the order of its rows
            reader = self._reader(lane)
            reader.skip(start - self._passed[lane])
            self._passed[lane] = stop
            for part, number, row in reader.read(stop - start):
                yield reader.names[part], number, row

    def _peek(self, lane: int, num_rows: int) -> tuple[int, LanePosition]:
        """Return how many rows a lane has left, up to a number, and its position at the start of a global batch."""
        reader = self._reader(lane)
        reader.skip(-self._passed[lane])
        self._passed[lane] = 0
        return reader.peek(num_rows), reader.position

    def _reader(self, lane: int) -> LaneReader:
        reader = self._readers.get(lane)
        if reader is None:
            position = self._pass.position(lane, self._places[lane])
            reader = self._readers[lane] = self._pass.reader(lane, self._opened, position)
            self._passed[lane] = 0
        return reader


def collated(collate: Callable[[list[Any]], Any], rows: list[Any], places: Sequence[str]) -> Any:
    """Return a batch of rows. `places` names each row for errors.

    Raises:
        StreamError: `collate` failed. The message names the first row whose form differs from row 0.
    """
    try:
        return collate(rows)
    except Exception as error:  # a function of the user or of a framework may raise anything
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
    """Yield the name of each field of a row and the kind of its value."""
    named = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, tuple | list) else ()
    of_array = f" of shape {tuple(row.shape)} and type {row.dtype}" if hasattr(row, "shape") else ""
    of_several = f" of {len(row)}" if isinstance(row, Mapping | tuple | list) else ""
    yield f"`{field}`", f"a `{type(row).__name__}`{of_several}{of_array}"
    for name, value in named:
        yield from _forms(value, f"{field}[{name!r}]")


class LoaderProcesses:
    """Several processes that make parts of each batch in parallel.

    Args:
        makers: What each process makes, in the order of lanes.
        join: Combines the parts that have rows into one batch.
        num_ahead: How many global batches to make in advance.
        begin: Called first in each process.
    """

    def __init__(
        self,
        makers: Sequence[BatchMaker],
        join: Callable[[list[Any]], Any],
        num_ahead: int,
        begin: Callable[[], None],
    ) -> None:
        self.num_ahead = num_ahead
        self._join = join
        self._ends = [maker.watched.stop for maker in makers[:-1]]
        self._processes = [_LoaderProcess(maker, begin) for maker in makers]

    def order(self, order: BatchOrder) -> None:
        for number, process in enumerate(self._processes):
            own = [
                [each for each in wanted if bisect_right(self._ends, each.lane) == number] for wanted in order.batches
            ]
            process.send(order._replace(batches=own))

    def receive(self) -> MadeBatches:
        made = [process.receive() for process in self._processes]
        batches = [self._joined(parts) for parts in zip(*(each.batches for each in made), strict=True)]
        return MadeBatches(batches, [each for part in made for each in part.found])

    def _joined(self, parts: Sequence[Any]) -> Any:
        found = [part for part in parts if part is not None]
        return self._join(found) if found else None

    def end_loading(self) -> None:
        for process in self._processes:
            process.kill()


class _LoaderProcess:
    """The worker's handle on one loader process."""

    def __init__(self, maker: BatchMaker, begin: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(maker, theirs, begin), name="raysgd-loader", daemon=True)
        self._process.start()
        theirs.close()  # so that the worker notices if the process ends

    def send(self, order: BatchOrder) -> None:
        try:
            self._connection.send(order)
        except OSError:
            raise self._died() from None

    def receive(self) -> MadeBatches:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(answer, MadeBatches):
            return answer
        raise answer

    def _died(self) -> StreamError:
        self._process.join(timeout=1.0)
        code = self._process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return StreamError(f"a loader process {how}. If it ran out of memory, use fewer, or a smaller `prefetch`.")

    def kill(self) -> None:
        self._process.kill()  # it may be busy for long, and holds nothing that is needed
        self._process.join()
        self._process.close()
        self._connection.close()


def _serve(maker: BatchMaker, connection: Connection[Any, BatchOrder], begin: Callable[[], None]) -> None:
    """Answer orders until the process is killed. A thread sends the answers, so they may wait here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    begin()
    answers: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_send, args=(connection, answers), daemon=True).start()
    while True:
        try:
            order = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answers.put(maker.make(order))
        except Exception as error:  # the worker raises it
            answers.put(ExceptionWithTraceback(error, error.__traceback__))


def _send(connection: Connection[Any, BatchOrder], answers: SimpleQueue[Any]) -> None:
    while True:
        answer = answers.get()
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            connection.send(StreamError(f"what a loader process made cannot be sent: {type(error).__name__}: {error}"))


def end_with_parent() -> None:
    """End this process as soon as its parent is gone. Does nothing on systems that cannot report that (Linux can)."""
    gc.freeze()  # garbage of the parent may refer to threads that do not exist here
    try:
        handle = os.pidfd_open(os.getppid())  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, OSError):
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while not poll.poll():
            pass
        os._exit(1)

    threading.Thread(target=wait, name="raysgd-parent", daemon=True).start()


class ArrayCollate:
    """Stacks corresponding values of rows. Rows may be nested tuples, lists and dicts.

    Args:
        as_array: Turns a list of values into a column.
    """

    def __init__(self, as_array: Callable[[Any], Any] = np.asarray) -> None:
        self._as_array = as_array

    def __call__(self, rows: list[Any]) -> Any:
        return _built(rows, self._as_array)

    def join(self, batches: list[Any]) -> Any:
        """Combine batches into one."""
        return batches[0] if len(batches) == 1 else _built(batches, np.concatenate)

    def begin_process(self) -> None:
        """Do nothing."""


def _built(parts: list[Any], leaf: Callable[[Any], Any]) -> Any:
    """Return the common structure of all parts, with each leaf made of theirs."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _built([part[name] for part in parts], leaf) for name in first}
    if isinstance(first, tuple | list):
        columns = [_built(list(column), leaf) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return leaf(parts)


BatchLoader: TypeAlias = BatchMaker | LoaderProcesses
