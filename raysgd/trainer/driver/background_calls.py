"""Trainer calls that run in a background thread of the driver while the user's program continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from raysgd.core.cluster.ray_session import run_into
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.shared.call import CallHandle
from raysgd.core.text.tracebacks import hide_library_frames
from raysgd.exceptions import OnFailure

T = TypeVar("T")


@hide_library_frames
class BackgroundCall(CallHandle[T]):
    """A handle to a trainer's call that runs in a background thread.

    Args:
        future: Receives the call's result or error.
        interrupt: Interrupts the call as Ctrl-C would. Called from a thread other than the one that runs the call.
    """

    def __init__(self, future: Future[T], interrupt: Callable[[], None]) -> None:
        self._future, self._interrupt = future, interrupt

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return its result. Ctrl-C during the wait interrupts the call.

        Args:
            timeout: Seconds to wait. None waits until the call finishes.

        Raises:
            TimeoutError: The call is still running. It is not interrupted.
            TrainerShutdownError: The trainer was shut down, or its Ray session ended, before the call finished.
            Exception: The error that the call raised.
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
    """Starts a trainer's background calls. They run one after the other, in the order in which they were started.

    Args:
        controller: Runs the calls on the workers.
        at_once: True to run each call inside `begin`, without a background thread. Needed if the driver is a worker.
    """

    def __init__(self, controller: ElasticController, at_once: bool) -> None:
        self._controller, self._at_once = controller, at_once

    def begin(
        self, work: Callable[[], Any], rest: Callable[[Any, Callable[[], None]], Any] | None = None
    ) -> CallHandle[Any]:
        """Start a call in a background thread and return its handle. Later calls to the trainer wait for this call.

        Args:
            work: Runs the call on the workers. If `rest` is given, later calls wait only for `work`.
            rest: Finishes the call on a spare worker while later calls use the training workers. Takes the result of
                `work` and a function that raises `KeyboardInterrupt` if the call was interrupted.

        Raises:
            TrainerShutdownError: The trainer was shut down.
            ValueError: This thread is inside a block of `Turns.closed`.
        """
        turns = self._controller.turns
        place = turns.reserve()

        def run() -> Any:
            with turns.take_turn(place):
                begun = work()
            return begun if rest is None else rest(begun, place.check_wanted)

        if self._at_once:
            future = Future[Any]()
            run_into(future, run)
        else:
            with OnFailure(partial(turns.give_up, place)):
                future = self._controller.threads.start(run, "raysgd-call")
        return BackgroundCall(future, partial(turns.interrupt_call, place))
