"""`Ledger`: measures how one worker spends its time, to find out how much of it goes into useful training.

The ledger assigns every second since its creation to one bin: a category such as waiting for data or taking a
snapshot. In a standby worker, the measurement restarts when the worker joins a group. The training loop reports each
switch to another bin, which costs one reading of the clock.

Two kinds of time move to another bin later. If a step is interrupted, its time was not useful, because the step will be
repeated. And the time after an interrupted call counts as recovery only if the worker continues in a new group. Until
this is known, that time is in one of two internal bins.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from raysgd.core.numbers import timing
from raysgd.core.numbers.timing import TimeSpent
from raysgd.exceptions import OnFailure

BROKEN, LEFT = "(broken off)", "(group left)"
"""Internal bins for the time since a call was interrupted, and since the worker left the group.

Their time later moves to recovery, or to the time between two calls.
"""

# The bins to which the time of an interrupted step moves. A failed exchange between ranks was waiting for a lost rank,
# so its time counts as detecting the failure.
_UNDONE_AS = {timing.USEFUL: timing.AGAIN, timing.EXCHANGE: timing.DETECT, timing.SLOWER_RANK: timing.DETECT}

ItemT = TypeVar("ItemT")


class Ledger:
    """Assigns the time of one worker to bins: categories such as waiting for data, training steps, and snapshots.

    Examples:
        >>> ledger = Ledger(clock=iter(range(20)).__next__)
        >>> ledger.begin_call()
        >>> with ledger.call():
        ...     for batch in ledger.timing(iter("ab")):
        ...         pass
        >>> ledger.of_call()
        {'useful': 2.0, 'data': 3.0, 'other': 4.0}

    Args:
        clock: Function that returns a time in seconds. Only differences between two times are used.

    Attributes:
        own_s: Seconds of the call in which this rank did not wait for other ranks. None if it has not worked yet.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._is_successor = self._waits_for_group = False
        self._own_s = self._own_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._of = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._seconds = dict.fromkeys((*timing.BINS, BROKEN, LEFT), 0.0)
        self._complete = self._seconds.copy()  # the seconds in each bin when the last step was completed
        self._bin, self._since = timing.START_UP, self._clock()
        self._saved_s = 0.0
        self._at_call: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------ bins

    def enter(self, name: str) -> str:
        """Assign the time from now on to the bin `name`. Return the name of the previous bin."""
        with self._lock:
            now = self._clock()  # read under the lock, so that `now` is never before the start of the current bin
            before, self._bin = self._bin, name
            self._seconds[before] += now - self._since
            self._since = now
            return before

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Assign the time of the block to the bin `name`, and the time after the block to the bin from before."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def _move(self, source: str, target: str, seconds: float | None = None) -> None:
        with self._lock:
            moved = self._seconds[source] if seconds is None else min(seconds, self._seconds[source])
            self._seconds[source] -= moved
            self._seconds[target] += moved

    # ------------------------------------------------------------------------------------------------ a training call

    def begin_call(self) -> None:
        """Start to measure a new call.

        If an earlier call was interrupted, the time since then counts as time between calls, not as recovery.
        """
        self._assign_interrupted(timing.DRIVER, timing.DRIVER)
        self.enter(timing.OTHER)
        self._at_call = self._shown()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Inside the block, measure the time of a training call.

        If the block raises an error, the last step counts as interrupted. After the answer to the call, the caller
        enters the bin `DRIVER`.
        """
        self.enter(timing.OTHER)
        self._own_s = 0.0
        with OnFailure(self._break_off):
            yield
        self.commit()
        self._own_since = 0.0
        self.enter(timing.OTHER)

    def begin_own_work(self) -> None:
        """Record that this rank does not wait for other ranks from now on. It draws a batch, for example."""
        self._own_since = self._own_since or self._clock()

    def end_own_work(self) -> None:
        """Record that this rank may wait for other ranks from now on, for example in an all-reduce."""
        if self._own_since:
            self._own_s += self._clock() - self._own_since
            self._own_since = 0.0

    @property
    def own_s(self) -> float | None:
        own_s, since = self._own_s, self._own_since
        # Add the time of the running batch, so that the result keeps growing while user code hangs in a batch.
        return own_s + (self._clock() - since if since else 0.0) or None

    def timing(self, batches: Iterator[ItemT]) -> Iterator[ItemT]:
        """Yield the batches, and measure how long it takes to draw each batch and to train on it.

        Drawing a batch counts as waiting for data. The time from then until the next batch is drawn counts as a
        training step.
        """
        self.enter(timing.DATA)
        self._own_since = self._since
        for batch in batches:
            self.enter(timing.USEFUL)
            yield batch
            self.enter(timing.DATA)
            self._own_since = self._own_since or self._since
        self._own_since = 0.0
        self.enter(timing.OTHER)

    def commit(self) -> None:
        """Record that the current step is completed. Its time stays in its bin, because the step is never repeated."""
        if self._bin in _UNDONE_AS:
            self.enter(self._bin)
        self._complete = self._seconds.copy()

    def _break_off(self) -> None:
        """Record that the current step was interrupted. Its time moves to other bins, as the step will be repeated."""
        self._own_since = 0.0
        self.enter(BROKEN)
        for name, target in _UNDONE_AS.items():
            self._move(name, target, self._seconds[name] - self._complete[name])

    def exchanging(self, group: Any) -> AbstractContextManager[None]:
        """Return a context manager that counts the time of its block as communication with the other ranks.

        The block is no own work of this rank, which goes on afterward if it was running before.

        Args:
            group: Communication group of the ranks. Its attribute `waited_s` counts the seconds that this rank has
                waited for other ranks.
        """
        return _Exchange(self, group)

    def begin_exchange(self) -> bool:
        """Record that communication with other ranks starts.

        Return True if this happens in a training step, so that `end_exchange` must be called. Otherwise, the time is
        not measured.
        """
        if self._bin != timing.USEFUL:
            return False
        self.enter(timing.EXCHANGE)
        return True

    def end_exchange(self, waited_s: float = 0.0) -> None:
        """Record that communication with other ranks has ended.

        Args:
            waited_s: How many seconds of the communication this rank was waiting for slower ranks.
        """
        if self._bin == timing.EXCHANGE:
            self.enter(timing.USEFUL)
            if waited_s:
                of_step = self._seconds[timing.EXCHANGE] - self._complete[timing.EXCHANGE]
                self._move(timing.EXCHANGE, timing.SLOWER_RANK, min(waited_s, of_step))

    # ------------------------------------------------------------------------------------------------ groups

    def stand_by(self) -> None:
        """Record that this is a standby worker. Its time is measured from the moment when it joins a group."""
        self._is_successor = self._waits_for_group = True

    def note_recovery(self) -> None:
        """Record that this worker has left its group, if a call was interrupted in the group."""
        if self._bin == BROKEN:
            self.enter(LEFT)

    @contextmanager
    def regrouping(self, goes_on: Callable[[], bool]) -> Iterator[None]:
        """Inside the block, measure the time that it takes to join a new group of workers.

        Args:
            goes_on: Function that returns True if a call continues in the new group. The time after the block then
                counts as recovery. If a call was interrupted on this rank, the call always continues, and this function
                is not called.
        """
        if self._waits_for_group:
            self._waits_for_group = False
            self._begin()
        self._own_s, was_inside = 0.0, self._bin in (BROKEN, LEFT)  # the ranks' times are compared: all begin at 0
        self._assign_interrupted(timing.DETECT, timing.FORM)
        self.enter(timing.HAND_OVER)
        yield
        self.enter(timing.RESUME if was_inside or goes_on() else timing.DRIVER)

    def _assign_interrupted(self, broken: str, left: str) -> None:
        if self._bin in (BROKEN, LEFT):
            self.enter(self._bin)
        for name, target in ((BROKEN, broken), (LEFT, left)):
            if self._seconds[name]:
                self._move(name, target)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside the block, measure the time that it takes to copy the training state.

        The steps before the copy count as saved from then on.
        """
        with self.inside(timing.SNAPSHOT):
            yield
        self._saved_s = self._seconds[timing.USEFUL]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the block, measure the time of a call to `validate` or `predict`."""
        self.begin_call()
        self.enter(timing.DRIVER)
        with self.inside(timing.EVALUATION):
            yield

    # ------------------------------------------------------------------------------------------------ readings

    def reading(self) -> TimeSpent:
        """Return how much time is in each bin up to now. A second thread may call this method."""
        seconds = self._shown()
        return TimeSpent(self._of, seconds, max(0.0, seconds[timing.USEFUL] - self._saved_s), self._is_successor)

    def of_call(self) -> dict[str, float]:
        """Return how many seconds of the running call are in each bin. Bins without time are left out."""
        found = {name: spent - self._at_call.get(name, 0.0) for name, spent in self._shown().items()}
        return {name: spent for name, spent in found.items() if spent > 0}

    def _shown(self) -> dict[str, float]:
        with self._lock:
            now = self._clock()
            present = {**self._seconds, self._bin: self._seconds[self._bin] + now - self._since}
        present[timing.DRIVER] += present.pop(BROKEN) + present.pop(LEFT)
        return present


class _Exchange(AbstractContextManager[None]):
    """Context manager that `Ledger.exchanging` returns. It is a class, because a generator would take twice as long."""

    __slots__ = ("_before_s", "_group", "_is_of_step", "_ledger", "_was_own_work")

    def __init__(self, ledger: Ledger, group: Any) -> None:
        self._ledger, self._group = ledger, group

    def __enter__(self) -> None:
        self._before_s, self._was_own_work = self._group.waited_s, self._ledger._own_since > 0
        self._ledger.end_own_work()
        self._is_of_step = self._ledger.begin_exchange()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._is_of_step:
                self._ledger.end_exchange(self._group.waited_s - self._before_s)
            if self._was_own_work:
                self._ledger.begin_own_work()
