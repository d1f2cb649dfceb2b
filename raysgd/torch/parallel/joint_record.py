"""A record of what the ranks do in a training call that all of them have to do alike.

A rank that makes another number of exchanges than the others pairs its own with other ones of theirs, or waits for ever
in the last one. Nothing in an exchange tells, unless the sizes differ. So each rank records what it does, without an
exchange, and the driver compares the records: those in heartbeats while the call runs, and all once it is over or has
failed.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from raysgd.messages.joint_work import JointWork

_NUM_MARKS = 32  # by so much ranks may be apart that do the same: a GPU works on behind what was recorded


class JointRecord:
    """This rank's record of the calls of one group. It is read in a second thread."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Start over, in another group."""
        with self._changing:
            self._start(0)

    def begin(self) -> None:
        """Begin a call, as all ranks do."""
        with self._changing:
            self._start(self._number + 1)

    def _start(self, number: int) -> None:
        self._number, self._is_open, self._is_over = number, number > 0, False
        self._counts: Counter[str] = Counter()
        self._marks = deque([0], _NUM_MARKS)

    def note(self, what: str) -> None:
        """Record that something begins that all ranks do at this place."""
        with self._changing:
            if self._is_open:
                self._counts[what] += 1
                self._marks.append(zlib.crc32(what.encode(), self._marks[-1]))

    @property
    def work(self) -> JointWork | None:
        """The work of the last call of this group; None where there was none."""
        with self._changing:
            if not self._number:
                return None
            return JointWork(dict(self._counts), tuple(self._marks), self._is_over, self._number)

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Inside is the rest of the call."""
        try:
            yield
            self._is_over = True
        finally:
            self._is_open = False
