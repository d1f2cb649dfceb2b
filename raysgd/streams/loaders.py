"""The loading of one worker's part of the global batches: what is ordered, and who makes it.

Batches are made where they are needed, or ahead of the training in processes, each of which reads some of the worker's
lanes. These are forked, so nothing of the stream has to be pickled. They hold no state that anyone needs: what they
have made ahead is made again after a failure.
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
        """Return one batch of one or several, whose rows are all different."""

    def begin_process(self) -> None:
        """Called first in a process that makes batches."""


class BatchOrder(NamedTuple):
    """An order for batches of one global batch.

    Attributes:
        batches: For each batch that the worker takes of it the rows of lanes; nothing for a batch without any.
        counts: How many rows of each lane the global batch has.
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


class BatchMaker:
    """Reads lanes, and makes batches of their rows when they are needed. A lane is opened when rows of it are needed.

    Args:
        of_pass: The pass.
        watched: The lanes to look at for ends. Some rows of their neighbors are read, too: where a share ends inside of
            a lane, two workers read it.
        collate: Makes a batch of a list of rows.

    Attributes:
        num_ahead: How many global batches to order ahead of the one that is needed.
    """

    num_ahead = 0

    def __init__(self, of_pass: StreamPass, watched: range, collate: Callable[[list[Any]], Any]) -> None:
        self.watched = watched
        self._pass, self._collate = of_pass, collate
        self._places: Sequence[Place] = ()  # as the present global batch begins
        near = range(max(0, watched.start - _NUM_NEIGHBORS), min(of_pass.num_lanes, watched.stop + _NUM_NEIGHBORS))
        self._opened = of_pass.open_shards(near)
        self._readers: dict[int, LaneReader] = {}
        self._passed: dict[int, int] = {}  # rows of the present global batch; negative for a lane that is behind
        self._orders: deque[BatchOrder] = deque()

    def order(self, order: BatchOrder) -> None:
        """Order something. What is ordered is made in the same order."""
        self._orders.append(order)

    def receive(self) -> MadeBatches:
        """Return what became of the first order that was not answered yet."""
        return self.make(self._orders.popleft())

    def end_loading(self) -> None:
        """Do nothing: all that is open closes by itself."""

    def make(self, order: BatchOrder) -> MadeBatches:
        """Make the batches of an order."""
        self._places = order.places
        batches = [self._batch(wanted) if wanted else None for wanted in order.batches]
        for lane in list(self._readers):
            self._passed[lane] -= order.counts[lane]
            if self._passed[lane] < -_MOST_BEHIND and lane not in self.watched:
                del self._readers[lane], self._passed[lane]  # it is cheaper to open it again
        found = [self._peek(lane, order.num_seen) for lane in self.watched] if order.num_seen else []
        return MadeBatches(batches, found)

    def _batch(self, wanted: Sequence[LaneSlice]) -> Any:
        steps, rows, places = self._pass.last_steps, [], []
        for lane, start, stop in wanted:  # those of a lane that come first are wanted first
            reader = self._reader(lane)
            reader.skip(start - self._passed[lane])
            self._passed[lane] = stop
            for part, number, row in reader.read(stop - start):
                shard = reader.names[part]
                rows.append(steps(row, shard, number))
                places.append(f"shard {shard!r}, row {number}")
        return collated(self._collate, rows, places)

    def _peek(self, lane: int, num_rows: int) -> tuple[int, LanePosition]:
        """Return how many rows a lane has left, up to a number, and where it is as a global batch begins."""
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
    """Return a batch of rows, each of which is from one of the places.

    Raises:
        StreamError: `collate` failed. It names the first row that has not the form of row 0.
    """
    try:
        return collate(rows)
    except Exception as error:  # of a function of the user, or of a framework
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


class LoaderProcesses:
    """Some processes, which make their parts of each batch side by side.

    Args:
        makers: What each of them makes, in the order of their lanes.
        join: Makes one batch of the parts that have rows.
        num_ahead: How many global batches to make ahead.
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
    """One of them, seen from the worker."""

    def __init__(self, maker: BatchMaker, begin: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(maker, theirs, begin), name="raysgd-loader", daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen

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
        self._process.kill()  # it may be in the middle of something that takes long, and holds nothing that is needed
        self._process.join()
        self._process.close()
        self._connection.close()


def _serve(maker: BatchMaker, connection: Connection[Any, BatchOrder], begin: Callable[[], None]) -> None:
    """Make what is ordered, until the process is ended. Another thread sends it, so what is ready waits here."""
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
        except Exception as error:  # whatever it is, it is raised in the worker
            answers.put(ExceptionWithTraceback(error, error.__traceback__))


def _send(connection: Connection[Any, BatchOrder], answers: SimpleQueue[Any]) -> None:
    while True:
        answer = answers.get()
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            connection.send(StreamError(f"what a loader process made cannot be sent: {type(error).__name__}: {error}"))


def end_with_parent() -> None:
    """End this process as soon as its parent is gone. Does nothing where the system cannot tell (Linux can)."""
    gc.freeze()  # what was garbage in the parent may have threads that do not exist here
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
    """Stacks what rows have in the same place: of tuples, lists and dicts, also nested.

    Args:
        as_array: Makes a column of its values.
    """

    def __init__(self, as_array: Callable[[Any], Any] = np.asarray) -> None:
        self._as_array = as_array

    def __call__(self, rows: list[Any]) -> Any:
        return _built(rows, self._as_array)

    def join(self, batches: list[Any]) -> Any:
        """Return one batch of one or several."""
        return batches[0] if len(batches) == 1 else _built(batches, np.concatenate)

    def begin_process(self) -> None:
        """Do nothing."""


def _built(parts: list[Any], leaf: Callable[[Any], Any]) -> Any:
    """Return the same structure as that of each part, with a leaf made of theirs."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _built([part[name] for part in parts], leaf) for name in first}
    if isinstance(first, tuple | list):
        columns = [_built(list(column), leaf) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return leaf(parts)


BatchLoader: TypeAlias = BatchMaker | LoaderProcesses
