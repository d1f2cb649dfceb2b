"""A loop of user code that lives through changes of its group: it stands still in `next` meanwhile. Why: ADR 127."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

from raysgd.worker.data.batch_streams import PlaceInStep, WatchedBatches

_END_S = 1.0


class LoopEnded(BaseException):
    """Ends a loop that is not needed any more, past any `except Exception` of user code."""


class KeptLoop(WatchedBatches):
    """A `train_epoch` in a separate thread, and the batches that it is given.

    Only one of two threads runs at a time: the loop, or the one that the driver calls.

    Args:
        batches: The first batches.
        step: See `WatchedBatches`.
        is_pause: Whether what drawing a batch has raised is kept from user code, because other batches follow.

    Attributes:
        is_over: Whether user code has left the loop.
    """

    def __init__(self, batches: Iterator[Any], step: PlaceInStep, is_pause: Callable[[BaseException], bool]) -> None:
        super().__init__(batches, step)
        self.is_over = False
        self._is_pause = is_pause
        self._thread: threading.Thread | None = None
        self._loop_may_run, self._driver_may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._is_ended = False
        self._returned: Any = None
        self._raised: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        self.was_touched = True
        return self

    def __next__(self) -> Any:
        self.was_touched = True
        while not self._is_ended:
            try:
                return next(self._batches)
            except BaseException as error:
                if not self._is_pause(error):
                    raise
                self._raised = error
            self._driver_may_run.release()
            self._loop_may_run.acquire()
        raise LoopEnded

    def follow(self, batches: Iterator[Any]) -> None:
        """Let the loop go on with these."""
        self._batches = batches

    def run(self, body: Callable[[], Any]) -> Any:
        """Begin the loop, or go on with it; return what it returns in the end.

        Args:
            body: The loop. Where it stands still in the middle, that one goes on.

        Raises:
            BaseException: What the loop has raised, or what it stands still for.
        """
        if self._thread is None:
            run = copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run, body), name="train_epoch", daemon=True)
            self._thread.start()
        else:
            self._loop_may_run.release()
        self._driver_may_run.acquire()
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        return self._returned

    def _run(self, body: Callable[[], Any]) -> None:
        try:
            self._returned = body()
        except BaseException as error:
            self._raised = error
        self.is_over = True
        self._driver_may_run.release()

    def end(self) -> None:
        """End the loop where it stands."""
        self._is_ended = True
        self._loop_may_run.release()
        if self._thread is not None:
            self._thread.join(_END_S)
