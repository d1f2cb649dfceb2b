"""Makes the batches of one worker from the rows of a stream, in the worker itself or in loader processes.

A loader process makes batches before the worker needs them. It reads some of the lanes (row sequences of the stream)
that the worker reads. It is forked, so the stream need not be picklable. The state of a loader process need not be
saved: after a failure, the batches that were made in advance are made again.
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
from raysgd.streams.lanes import LanePosition, LaneReader, LaneSlice, OpenShards, Place, StreamPass

_NUM_NEIGHBORS = 2
_MOST_BEHIND = 4096


class Collate(Protocol):
    """Interface of objects that combine rows into batches."""

    def __call__(self, rows: list[Any]) -> Any:
        """Combine rows into one batch."""

    def join(self, batches: list[Any]) -> Any:
        """Concatenate several batches into one batch."""

    def begin_process(self) -> None:
        """Prepare a loader process. This is called first in each loader process."""


class BatchOrder(NamedTuple):
    """A request for the batches that one worker gets from a global batch.

    Attributes:
        batches: For each batch of the worker, from which lanes its rows come. Empty for a batch without rows.
        counts: Number of rows that the global batch takes from each lane.
        places: For each lane, the place at which the rows of the global batch start.
        num_seen: Number of rows to look ahead after the global batch in each lane that the worker watches. 0 to not
            look ahead.
    """

    batches: Sequence[Sequence[LaneSlice]]
    counts: Sequence[int]
    places: Sequence[Place]
    num_seen: int = 0


class MadeBatches(NamedTuple):
    """The answer to a `BatchOrder`.

    Attributes:
        batches: The batches, with None in place of a batch without rows.
        found: For each lane that the worker watches, a pair: how many rows are left after the global batch, counted up
            to `num_seen`, and the position after the global batch. Empty if `num_seen` is 0.
    """

    batches: list[Any]
    found: list[tuple[int, LanePosition]]


class BatchMaker:
    """Reads lanes and makes batches when they are needed. A lane is opened when its first row is needed.

    Args:
        of_pass: The pass over the stream.
        watched: The lanes in which this worker looks ahead, to find out where they end. The worker also reads rows of
            neighboring lanes: if its part of a global batch ends inside a lane, two workers read this lane.
        collate: Function that combines a list of rows into a batch.

    Attributes:
        num_ahead: Number of global batches that should be requested in advance.
    """

    num_ahead = 0

    def __init__(self, of_pass: StreamPass, watched: range, collate: Callable[[list[Any]], Any]) -> None:
        self.watched = watched
        self._pass, self._collate = of_pass, collate
        self._places: Sequence[Place] = ()  # for each lane, the place at which the current global batch starts
        near = range(max(0, watched.start - _NUM_NEIGHBORS), min(of_pass.num_lanes, watched.stop + _NUM_NEIGHBORS))
        self._opened = OpenShards(of_pass, near)
        self._readers: dict[int, LaneReader] = {}
        self._orders: deque[BatchOrder] = deque()

    def order(self, order: BatchOrder) -> None:
        """Request batches. Requests are answered in the order in which they were made."""
        self._orders.append(order)

    def receive(self) -> MadeBatches:
        """Return the answer to the oldest request that was not answered yet."""
        return self.make(self._orders.popleft())

    def end_loading(self) -> None:
        """Do nothing, because open shards are closed when they are garbage-collected."""

    def make(self, order: BatchOrder) -> MadeBatches:
        """Make the requested batches, and look ahead in lanes if this was requested."""
        self._places = order.places
        batches = [self._batch(wanted) if wanted else None for wanted in order.batches]
        for lane, reader in list(self._readers.items()):
            reader.passed -= order.counts[lane]
            if reader.passed < -_MOST_BEHIND and lane not in self.watched:
                del self._readers[lane]  # opening the lane again is faster than skipping rows
        found = [self._peek(lane, order.num_seen) for lane in self.watched] if order.num_seen else []
        return MadeBatches(batches, found)

    def _batch(self, wanted: Sequence[LaneSlice]) -> Any:
        steps, rows, places = self._pass.last_steps, [], []
        for shard, number, row in self.rows(wanted):
            rows.append(steps(row, shard, number))
            places.append(f"shard {shard!r}, row {number}")
        return collated(self._collate, rows, places)

    def rows(self, wanted: Sequence[LaneSlice]) -> Iterator[tuple[str, int, Any]]:
        """Yield for each row the name of its shard, its number in the shard, and the row itself.

        The steps of the stream after its last filter have not been applied to these rows yet.

        Args:
            wanted: From which lanes the rows come.
        """
        for lane, start, stop in wanted:  # slices of the same lane are in the order of rows
            reader = self._reader(lane)
            reader.skip(start - reader.passed)
            reader.passed = stop
            for part, number, row in reader.read(stop - start):
                yield reader.names[part], number, row

    def _peek(self, lane: int, num_rows: int) -> tuple[int, LanePosition]:
        """Return how many rows are left in a lane after the current global batch, and the position there.

        Args:
            lane: Index of the lane.
            num_rows: Count at most this many rows.
        """
        reader = self._reader(lane)
        reader.skip(-reader.passed)
        reader.passed = 0
        return reader.peek(num_rows), reader.position

    def _reader(self, lane: int) -> LaneReader:
        reader = self._readers.get(lane)
        if reader is None:
            position = self._pass.position(lane, self._places[lane])
            reader = self._readers[lane] = LaneReader(self._pass, lane, self._opened, position)
        return reader


def collated(collate: Callable[[list[Any]], Any], rows: list[Any], places: Sequence[str]) -> Any:
    """Combine rows into a batch.

    Args:
        collate: Function that combines a list of rows into a batch.
        rows: The rows.
        places: For each row, a description of where it comes from, for the error message.

    Raises:
        StreamError: `collate` failed. The message names the first row whose structure, types or shapes differ from
            those of the first row. If all rows match, it names the first and the last row.
    """
    try:
        return collate(rows)
    except Exception as error:  # a user's function may raise any exception
        first, forms = dict(_forms(rows[0])), [dict(_forms(row)) for row in rows]
        odd = next((number for number, each in enumerate(forms) if each != first), None)
        where = f"{places[0]}, to {places[-1]}"
        if odd is not None:
            own = forms[odd]
            field = next(name for name in {**first, **own} if first.get(name) != own.get(name))
            kinds = [each.get(field, "missing") for each in (own, first)]
            where = f"{places[odd]}: {field} is {kinds[0]}, and {kinds[1]} in {places[0]}"
        raise StreamError(f"rows cannot be collated into a batch ({where}): {type(error).__name__}: {error}") from error


def _forms(row: Any, field: str = "row") -> Iterator[tuple[str, str]]:
    """For each field of a row or of its nested containers, yield its name and a description of its type and shape."""
    named = row.items() if isinstance(row, Mapping) else enumerate(row) if isinstance(row, tuple | list) else ()
    of_array = f" of shape {tuple(row.shape)} and type {row.dtype}" if hasattr(row, "shape") else ""
    of_several = f" of {len(row)}" if isinstance(row, Mapping | tuple | list) else ""
    yield f"`{field}`", f"a `{type(row).__name__}`{of_several}{of_array}"
    for name, value in named:
        yield from _forms(value, f"{field}[{name!r}]")


class LoaderProcesses:
    """Makes batches in one or more loader processes, each of which makes a part of each batch.

    The methods `order`, `receive` and `end_loading`, and the attribute `watched`, are those of `BatchMaker`.

    Args:
        makers: For each process, the object that makes the process's parts of batches. These objects are in the order
            of the lanes that they read.
        join: Function that combines the parts of a batch into one batch. Parts without rows are left out.
        num_ahead: Number of global batches that should be requested in advance.
        begin: Function that is called first in each process.
    """

    def __init__(
        self,
        makers: Sequence[BatchMaker],
        join: Callable[[list[Any]], Any],
        num_ahead: int,
        begin: Callable[[], None],
    ) -> None:
        self.num_ahead = num_ahead
        self.watched = range(makers[0].watched.start, makers[-1].watched.stop)
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
        present = [part for part in parts if part is not None]
        return self._join(present) if present else None

    def end_loading(self) -> None:
        for process in self._processes:
            process.kill()


class _LoaderProcess:
    """Represents one loader process in the worker."""

    def __init__(self, maker: BatchMaker, begin: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(maker, theirs, begin), name="raysgd-loader", daemon=True)
        self._process.start()
        # Only the loader process may keep this end of the pipe open, so that the worker notices when that process ends.
        theirs.close()

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
        return StreamError(f"a loader process {how}. If it ran out of memory, lower `num_workers` or `prefetch`.")

    def kill(self) -> None:
        self._process.kill()  # do not wait: the process may be busy for a long time, and has no state to save
        self._process.join()
        self._process.close()
        self._connection.close()


def _serve(maker: BatchMaker, connection: Connection[Any, BatchOrder], begin: Callable[[], None]) -> None:
    """Make the requested batches until this loader process is killed. A second thread sends the batches to the worker.

    Args:
        maker: Makes the batches.
        connection: Connection to the worker.
        begin: Function to call first.
    """
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
        except Exception as error:  # the worker receives the error and raises it
            answers.put(ExceptionWithTraceback(error, error.__traceback__))


def _send(connection: Connection[Any, BatchOrder], answers: SimpleQueue[Any]) -> None:
    while True:
        answer = answers.get()
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            connection.send(StreamError(f"a loader process cannot send its batch: {type(error).__name__}: {error}"))


def end_with_parent() -> None:
    """Start a thread that ends this process when the parent process has ended.

    On systems without `os.pidfd_open`, such as macOS, no thread is started. On all systems, the objects that exist now
    are excluded from cyclic garbage collection.
    """
    gc.freeze()  # do not collect garbage of the parent process, which may refer to threads that do not exist here
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
    """Combines rows into a batch by stacking the corresponding values of all rows as NumPy arrays.

    Rows may be nested tuples, lists and dicts. A list becomes a tuple in the batch.

    Args:
        as_array: Function that converts a list of values to an array.
    """

    def __init__(self, as_array: Callable[[Any], Any] = np.asarray) -> None:
        self._as_array = as_array

    def __call__(self, rows: list[Any]) -> Any:
        return _built(rows, self._as_array)

    def join(self, batches: list[Any]) -> Any:
        """Concatenate several batches into one batch."""
        return batches[0] if len(batches) == 1 else _built(batches, np.concatenate)

    def begin_process(self) -> None:
        """Do nothing, because NumPy needs no preparation in a new process."""


def _built(parts: list[Any], leaf: Callable[[Any], Any]) -> Any:
    """Combine the corresponding values of several rows or batches, which have the same nested structure.

    Args:
        parts: The rows or batches.
        leaf: Function that combines a list of corresponding values.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _built([part[name] for part in parts], leaf) for name in first}
    if isinstance(first, tuple | list):
        columns = [_built(list(column), leaf) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return leaf(parts)


BatchLoader: TypeAlias = BatchMaker | LoaderProcesses
