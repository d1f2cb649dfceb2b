"""The goodput ledger of one replica: measures which part of its time goes into useful training.

The ledger assigns every second since the replica joined a group to one bin: a category such as waiting for data or
taking a snapshot. It is independent of the framework. The training loop reports each switch to another bin, which costs
one reading of the clock. Two kinds of time are assigned late. First, if a step is interrupted, its time moves to
another bin, because the step will be repeated. Second, the time after an interrupted call counts as recovery only if
the replica continues in a new group. Until that is known, this time stays in two internal bins.
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

from raysgd.core.engine.shared.time_spent import (
    AGAIN,
    BINS,
    DATA,
    DETECT,
    DRIVER,
    EVALUATION,
    EXCHANGE,
    FORM,
    HAND_OVER,
    OTHER,
    RESUME,
    SLOWER_RANK,
    SNAPSHOT,
    START_UP,
    USEFUL,
    TimeSpent,
)
from raysgd.exceptions import OnFailure

BROKEN, LEFT = "(broken off)", "(group left)"
"""Time since a call was interrupted, and since the replica left the group. Later assigned to recovery or the driver."""

# The bins to which an interrupted step's time moves. A failed exchange was waiting for a lost rank, so its time counts
# as detection.
_UNDONE_AS = {USEFUL: AGAIN, EXCHANGE: DETECT, SLOWER_RANK: DETECT}

ItemT = TypeVar("ItemT")


class Ledger:
    """Assigns a replica's time to bins: categories such as waiting for data, training steps, and snapshots.

    Examples:
        >>> ledger = Ledger(clock=iter(range(20)).__next__)
        >>> ledger.begin_call()
        >>> with ledger.call():
        ...     for batch in ledger.timing(iter("ab")):
        ...         pass
        >>> ledger.of_call()
        {'useful': 2.0, 'data': 3.0, 'other': 4.0}

    Args:
        clock: Returns seconds. Only differences are used.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._is_successor = self._waits_for_place = False
        self._begin()

    def _begin(self) -> None:
        self._of = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._seconds = dict.fromkeys((*BINS, BROKEN, LEFT), 0.0)
        self._complete = self._seconds.copy()  # the seconds by bin, as of the last completed step
        self._bin, self._since = START_UP, self._clock()
        self._saved_s = 0.0
        self._at_call: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------ bins

    def enter(self, name: str) -> str:
        """Assign time from now on to the bin `name`, and return the previous bin."""
        with self._lock:
            now = self._clock()  # under the lock, so that the reading is never older than the start of the current bin
            before, self._bin = self._bin, name
            self._seconds[before] += now - self._since
            self._since = now
            return before

    def _move(self, source: str, target: str, seconds: float | None = None) -> None:
        with self._lock:
            moved = self._seconds[source] if seconds is None else min(seconds, self._seconds[source])
            self._seconds[source] -= moved
            self._seconds[target] += moved

    # ------------------------------------------------------------------------------------------------ a training call

    def begin_call(self) -> None:
        """Start a new call.

        If an earlier call was interrupted, assign the time since then to the driver, not to recovery.
        """
        self._settle(DRIVER, DRIVER)
        self.enter(OTHER)
        self._at_call = self._shown()

    @contextmanager
    def call(self, first: str = OTHER) -> Iterator[None]:
        """Assign the block's time to a training call, starting in bin `first`.

        If the block fails, its last step counts as interrupted.
        """
        self.enter(first)
        with OnFailure(self._break_off):
            yield
        self.commit()
        self.enter(OTHER)

    def end_call(self) -> None:
        """End the call: its answer is complete, so time from now on is the driver's."""
        self.enter(DRIVER)

    def timing(self, batches: Iterator[ItemT]) -> Iterator[ItemT]:
        """Yield the batches. Drawing a batch counts as waiting for data.

        The time until the next draw counts as a step.
        """
        self.enter(DATA)
        for batch in batches:
            self.enter(USEFUL)
            yield batch
            self.enter(DATA)
        self.enter(OTHER)

    def commit(self) -> None:
        """Complete the step, so that its time counts as useful, which means that the step will not be repeated."""
        if self._bin in _UNDONE_AS:
            self.enter(self._bin)
        self._complete = self._seconds.copy()

    def _break_off(self) -> None:
        """End an interrupted step. Its time moves to other bins, because the step will be repeated."""
        self.enter(BROKEN)
        for name, target in _UNDONE_AS.items():
            self._move(name, target, self._seconds[name] - self._complete[name])

    def exchanging(self, group: Any) -> AbstractContextManager[None]:
        """Assign the block's time to communication with the other ranks.

        Args:
            group: The communicating group. Its `waited_s` counts the seconds that this rank waited for other ranks.
        """
        return _Exchange(self, group)

    def begin_exchange(self) -> bool:
        """Start communication with other ranks. Return True if it belongs to a step and needs `end_exchange`."""
        if self._bin != USEFUL:
            return False
        self.enter(EXCHANGE)
        return True

    def end_exchange(self, waited_s: float = 0.0) -> None:
        """End communication with other ranks. This rank spent `waited_s` seconds of it waiting for slower ranks."""
        if self._bin == EXCHANGE:
            self.enter(USEFUL)
            if waited_s:
                of_step = self._seconds[EXCHANGE] - self._complete[EXCHANGE]
                self._move(EXCHANGE, SLOWER_RANK, min(waited_s, of_step))

    # ------------------------------------------------------------------------------------------------ groups

    def stand_by(self) -> None:
        """Mark the replica as standby. Its time is counted only from when it joins a group."""
        self._is_successor = self._waits_for_place = True

    def leave_group(self) -> None:
        """Record that the replica left a group in which a call was interrupted."""
        if self._bin == BROKEN:
            self.enter(LEFT)

    @contextmanager
    def regrouping(self, goes_on: Callable[[], bool]) -> Iterator[None]:
        """Assign the block's time to joining a new group.

        Args:
            goes_on: Returns True if a call continues in the new group, so that the time after the context counts as
                recovery. Not called if a call was interrupted on this rank, because that call continues.
        """
        if self._waits_for_place:
            self._waits_for_place = False
            self._begin()
        was_inside = self._bin in (BROKEN, LEFT)
        self._settle(DETECT, FORM)
        self.enter(HAND_OVER)
        yield
        self.enter(RESUME if was_inside or goes_on() else DRIVER)

    def _settle(self, broken: str, left: str) -> None:
        if self._bin in (BROKEN, LEFT):
            self.enter(self._bin)
        for name, target in ((BROKEN, broken), (LEFT, left)):
            if self._seconds[name]:
                self._move(name, target)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Assign the block's time to copying the state. Steps before the copy then count as saved."""
        before = self.enter(SNAPSHOT)
        try:
            yield
        finally:
            self.enter(before)
        self._saved_s = self._seconds[USEFUL]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Assign the block's time to a call that evaluates or predicts."""
        self.begin_call()
        self.enter(EVALUATION)
        try:
            yield
        finally:
            self.enter(DRIVER)

    # ------------------------------------------------------------------------------------------------ readings

    def reading(self) -> TimeSpent:
        """Return the time by bin up to now. May be called from a second thread."""
        seconds = self._shown()
        return TimeSpent(self._of, seconds, max(0.0, seconds[USEFUL] - self._saved_s), self._is_successor)

    def of_call(self) -> dict[str, float]:
        """Return the seconds of the running call by bin, such as waiting for data. Omit empty bins."""
        found = {name: spent - self._at_call.get(name, 0.0) for name, spent in self._shown().items()}
        return {name: spent for name, spent in found.items() if spent > 0}

    def _shown(self) -> dict[str, float]:
        with self._lock:
            now = self._clock()
            present = {**self._seconds, self._bin: self._seconds[self._bin] + now - self._since}
        present[DRIVER] += present.pop(BROKEN) + present.pop(LEFT)
        return present


class _Exchange(AbstractContextManager[None]):
    """Context manager for `Ledger.exchanging`. A class, because a generator would double the overhead."""

    __slots__ = ("_before_s", "_group", "_is_of_step", "_ledger")

    def __init__(self, ledger: Ledger, group: Any) -> None:
        self._ledger, self._group = ledger, group

    def __enter__(self) -> None:
        self._before_s = self._group.waited_s
        self._is_of_step = self._ledger.begin_exchange()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_of_step and error is None:
            self._ledger.end_exchange(self._group.waited_s - self._before_s)
