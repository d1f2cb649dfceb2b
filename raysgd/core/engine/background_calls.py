"""Calls that run in a thread of the driver while the program continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.shared.call import CallHandle, run_into
from raysgd.core.engine.shared.tracebacks import hide_library_frames
from raysgd.exceptions import OnFailure

T = TypeVar("T")

_END_S = 10.0


@hide_library_frames
class BackgroundCall(CallHandle[T]):
    """A call in a thread.

    Args:
        future: Receives the result or the error of the call.
        interrupt: Ends the call, from another thread.
    """

    def __init__(self, future: Future[T], interrupt: Callable[[], None]) -> None:
        self._future, self._interrupt = future, interrupt

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return its result. Ctrl-C during the wait ends the call.

        Args:
            timeout: Seconds to wait. None waits until the call has ended.

        Raises:
            TimeoutError: The call is still running. It continues.
            TrainerShutdownError: The trainer was shut down before the call was over.
            Exception: The error of the call.
        """
        try:
            wait([self._future], timeout)
        except KeyboardInterrupt:
            self._interrupt()
            wait([self._future])
            raise
        if not self._future.done():
            raise TimeoutError(f"The call is still running after `timeout={timeout!r}` seconds. It continues.")
        return self._future.result()


class BackgroundCalls:
    """Starts the background calls of one trainer. They run one after the other, in the order in which they were made.

    Args:
        controller: Runs the calls on the workers.
        at_once: True to finish each call before its handle is returned, because a worker runs in the driver.
    """

    def __init__(self, controller: ElasticController, at_once: bool) -> None:
        self._controller, self._at_once = controller, at_once
        self._threads: list[threading.Thread] = []

    def begin(
        self, work: Callable[[], Any], rest: Callable[[Any, Callable[[], None]], Any] | None = None
    ) -> CallHandle[Any]:
        """Start a call. Later calls of the trainer come after it.

        Args:
            work: The call, with its arguments. With `rest`, only the part that has to be done before later calls.
            rest: The larger part, which runs on a spare while later calls use the training workers. Called outside of
                turns, with the result of `work` and a function that raises when the call has to end.

        Raises:
            TrainerShutdownError: After `shutdown`.
        """
        turns = self._controller.turns
        place, future = turns.reserve(), Future[Any]()

        def run() -> Any:
            with turns.take_turn(place):
                begun = work()
            return begun if rest is None else rest(begun, place.check_wanted)

        if self._at_once:
            run_into(future, run)
        else:
            self._threads = [each for each in self._threads if each.is_alive()]
            thread = threading.Thread(target=run_into, args=(future, run), name="raysgd-call", daemon=True)
            with OnFailure(partial(turns.give_up, place)):
                thread.start()
            self._threads.append(thread)
        return BackgroundCall(future, partial(turns.interrupt_call, place))

    def await_end(self) -> None:
        """Wait for the threads. Their calls have been ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_END_S)
