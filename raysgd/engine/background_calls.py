"""Calls of a trainer that run in a thread of the driver, while the program goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from raysgd.engine.controller import ElasticController, PlaceInLine
from raysgd.engine.shared.call import CallHandle
from raysgd.engine.transfers import run_into

S = TypeVar("S")
T = TypeVar("T")

_END_S = 10.0


class BackgroundCall(CallHandle[T]):
    """A call in a thread.

    Args:
        future: Becomes what the call comes to.
        interrupt: Ends the call, from another thread.
    """

    def __init__(self, future: Future[T], interrupt: Callable[[], None]) -> None:
        self._future, self._interrupt = future, interrupt

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return what it came to. Ctrl-C meanwhile ends the call.

        Args:
            timeout: How many seconds to wait. None waits until the call has ended.

        Raises:
            TimeoutError: The call is still running. It goes on.
            TrainerShutdownError: The trainer was shut down before the call was over.
            Exception: What the call itself has raised.
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
    """Begins the calls of one trainer that run in threads, each of which takes its turn in the order of the calls.

    Args:
        controller: Has the workers.
        at_once: Whether a call is over before its handle is returned, because a worker is in the driver.
    """

    def __init__(self, controller: ElasticController, at_once: bool) -> None:
        self._controller, self._at_once = controller, at_once
        self._threads: list[threading.Thread] = []

    def begin(self, work: Callable[[], T]) -> CallHandle[T]:
        """Begins a call; whatever the trainer is told from now on comes after it.

        Args:
            work: The call, with its arguments.

        Raises:
            TrainerShutdownError: After `shutdown`.
        """
        place = self._controller.turns.reserve()

        def run() -> T:
            with self._controller.turns.take_turn(place):
                return work()

        return self._run(run, place)

    def begin_beside(self, work: Callable[[], S], rest: Callable[[S, Callable[[], None]], T]) -> CallHandle[T]:
        """Begins a call of which the larger part runs on a spare, while calls to the workers that train go on.

        Args:
            work: What has to be done ahead of these calls.
            rest: What is done outside of turns with the result of `work`, and with what raises once the call is to end.

        Raises:
            TrainerShutdownError: After `shutdown`.
        """
        place = self._controller.turns.reserve()

        def run() -> T:
            with self._controller.turns.take_turn(place):
                begun = work()
            return rest(begun, place.check_wanted)

        return self._run(run, place)

    def _run(self, work: Callable[[], T], place: PlaceInLine) -> CallHandle[T]:
        future: Future[T] = Future()

        if self._at_once:
            run_into(future, work)
        else:
            self._threads = [each for each in self._threads if each.is_alive()]
            thread = threading.Thread(target=run_into, args=(future, work), name="raysgd-call", daemon=True)
            self._threads.append(thread)
            thread.start()
        return BackgroundCall(future, partial(self._controller.turns.interrupt_call, place))

    def await_end(self) -> None:
        """Waits for the threads, whose calls were ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_END_S)
