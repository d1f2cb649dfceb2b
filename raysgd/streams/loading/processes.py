"""Processes that make batches ahead of the training: each reads some of the lanes of one worker.

They are forked, so nothing of the stream has to be pickled. They hold no state that anyone needs: what they have made
ahead is made again after a loss.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from queue import SimpleQueue
from typing import Any

from raysgd.exceptions import StreamError
from raysgd.streams.loading.making import BatchMaker, BatchOrder, MadeBatches
from raysgd.streams.loading.parent import end_with_parent


class LoaderProcesses:
    """Some processes, which make their parts of each batch side by side.

    Args:
        makers: What each of them makes, in the order of their lanes.
        join: Makes one batch of the parts that have rows.
        num_ahead: How many joint batches to make ahead.
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

    def close(self) -> None:
        for process in self._processes:
            process.close()


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

    def close(self) -> None:
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
        except Exception as error:
            answers.put(ExceptionWithTraceback(error, error.__traceback__))


def _send(connection: Connection[Any, BatchOrder], answers: SimpleQueue[Any]) -> None:
    while True:
        answer = answers.get()
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            connection.send(StreamError(f"what a loader process made cannot be sent: {type(error).__name__}: {error}"))
