"""The goodput ledger of one replica: every second since it took its place falls into one bin.

Pure accounting with a clock; it knows no framework. The training loop says which bin begins, so a switch costs a
reading of the clock. Two kinds of time are not known when they pass: that of a step, which moves to another bin if the
step breaks off, and that after a call broke off, which is a recovery only if the replica goes on in another group and
waits in bins that are not shown.
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

from raysgd.engine.shared.time_spent import (
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
"""After a call broke off, and after the group was left: a recovery, or the end of the call."""

_UNDONE_AS = {USEFUL: AGAIN, EXCHANGE: DETECT, SLOWER_RANK: DETECT}  # an exchange that broke waited for a lost rank

ItemT = TypeVar("ItemT")


class Ledger:
    """Accounts for the time of a replica.

    Examples:
        >>> ledger = Ledger(clock=iter(range(20)).__next__)
        >>> ledger.begin_call()
        >>> with ledger.call():
        ...     for batch in ledger.timing(iter("ab")):
        ...         pass
        >>> ledger.of_call()
        {'useful': 2.0, 'data': 3.0, 'other': 4.0}

    Args:
        clock: Returns seconds; only differences are used.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._is_successor = self._waits_for_place = False
        self._begin()

    def _begin(self) -> None:
        self._of = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._seconds = dict.fromkeys((*BINS, BROKEN, LEFT), 0.0)
        self._complete = self._seconds.copy()  # what complete steps took
        self._bin, self._since = START_UP, self._clock()
        self._saved_s = 0.0
        self._at_call: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------ bins

    def enter(self, name: str) -> str:
        """From now on the time falls into this bin; return the one before."""
        with self._lock:
            now = self._clock()  # inside: another thread that reads must not see a bin begin after its own look
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
        """A call begins that continues none: what came before was no recovery."""
        self._settle(DRIVER, DRIVER)
        self.enter(OTHER)
        self._at_call = self._shown()

    @contextmanager
    def call(self, first: str = OTHER) -> Iterator[None]:
        """Inside is a training call, or a part of one."""
        self.enter(first)
        with OnFailure(self._break_off):
            yield
        self.commit()
        self.enter(OTHER)

    def end_call(self) -> None:
        """The call has its answer."""
        self.enter(DRIVER)

    def timing(self, batches: Iterator[ItemT]) -> Iterator[ItemT]:
        """The batches; drawing one is waiting for data, and the time until the next is drawn belongs to a step."""
        self.enter(DATA)
        for batch in batches:
            self.enter(USEFUL)
            yield batch
            self.enter(DATA)
        self.enter(OTHER)

    def commit(self) -> None:
        """The step is complete: what was spent on it counts."""
        if self._bin in _UNDONE_AS:
            self.enter(self._bin)
        self._complete = self._seconds.copy()

    def _break_off(self) -> None:
        """The step broke off, and will be done again."""
        self.enter(BROKEN)
        for name, target in _UNDONE_AS.items():
            self._move(name, target, self._seconds[name] - self._complete[name])

    def exchanging(self, group: Any) -> AbstractContextManager[None]:
        """Inside, a step exchanges something with the other ranks, through `group`, which counts its `waited_s`."""
        return _Exchange(self, group)

    def begin_exchange(self) -> bool:
        """An exchange begins; returns whether it is one of a step, to be ended by `end_exchange`."""
        if self._bin != USEFUL:
            return False
        self.enter(EXCHANGE)
        return True

    def end_exchange(self, waited_s: float = 0.0) -> None:
        """It is over; for so long, this rank waited for others to begin it."""
        if self._bin == EXCHANGE:
            self.enter(USEFUL)
            if waited_s:
                of_step = self._seconds[EXCHANGE] - self._complete[EXCHANGE]
                self._move(EXCHANGE, SLOWER_RANK, min(waited_s, of_step))

    # ------------------------------------------------------------------------------------------------ other groups

    def stand_by(self) -> None:
        """This replica has no place yet: its time begins when it takes one."""
        self._is_successor = self._waits_for_place = True

    def leave_group(self) -> None:
        """The group was left, in which a call broke off."""
        if self._bin == BROKEN:
            self.enter(LEFT)

    @contextmanager
    def regrouping(self, goes_on: Callable[[], bool]) -> Iterator[None]:
        """Inside, the replica takes its place in another group.

        Args:
            goes_on: Asked afterwards, where no call broke off: whether there is a call that goes on.
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
        """Inside, the state is copied: useful steps up to here are saved then."""
        before = self.enter(SNAPSHOT)
        try:
            yield
        finally:
            self.enter(before)
        self._saved_s = self._seconds[USEFUL]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside is a call that evaluates or predicts."""
        self.begin_call()
        self.enter(EVALUATION)
        try:
            yield
        finally:
            self.enter(DRIVER)

    # ------------------------------------------------------------------------------------------------ what it says

    def reading(self) -> TimeSpent:
        """Return what the time was spent on, up to now; may be called from a second thread."""
        seconds = self._shown()
        return TimeSpent(self._of, seconds, max(0.0, seconds[USEFUL] - self._saved_s), self._is_successor)

    def of_call(self) -> dict[str, float]:
        """Return what the running call has spent its time on so far, without bins that are empty."""
        found = {name: spent - self._at_call.get(name, 0.0) for name, spent in self._shown().items()}
        return {name: spent for name, spent in found.items() if spent > 0}

    def _shown(self) -> dict[str, float]:
        with self._lock:
            now = self._clock()
            present = {**self._seconds, self._bin: self._seconds[self._bin] + now - self._since}
        present[DRIVER] += present.pop(BROKEN) + present.pop(LEFT)
        return present


class _Exchange(AbstractContextManager[None]):
    """One exchange of a step. A class, because a generator would cost as much as the rest."""

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
