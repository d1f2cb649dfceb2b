"""Copies of the state on a worker: those that wait for the driver to fetch them, and those taken inside a call.

Why a copy may be made after its call: ADR 4.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raysgd.engine.shared.replica import Capture

_INLINE_BYTES = 65536  # a state up to this size travels with the answer; a separate call would cost more


class StateCopy:
    """A copy of the state, or of this rank's part of a divided one, that may still have to be made.

    Args:
        content: What is copied, once it is made.
        num_bytes: Its size.
        is_part: Whether every rank has a part.
        fill: Makes it, if that is still to be done. The state must not change before.

    Attributes:
        seconds: How long making it took; None before that.
    """

    def __init__(
        self, content: Any, num_bytes: int, *, is_part: bool = False, fill: Callable[[], None] | None = None
    ) -> None:
        self._content, self.num_bytes, self.is_part, self._fill = content, num_bytes, is_part, fill
        self._lock = threading.Lock()
        self.seconds: float | None = None

    @property
    def is_made(self) -> bool:
        """True if the state may change."""
        return self._fill is None

    def made(self) -> Any:
        """The copy; any thread may ask for it, and the first one makes it."""
        with self._lock:
            if self._fill is not None:
                began = time.perf_counter()
                self._fill()
                self._fill, self.seconds = None, time.perf_counter() - began
            return self._content


class PendingCopies:
    """The copies of the whole state that rank 0 keeps until the driver has them.

    They are begun in the training thread, and claimed and fetched from other ones.
    """

    def __init__(self) -> None:
        self._kept: dict[int, StateCopy] = {}
        self._lock = threading.Lock()
        self._claimed: int | None = None
        self._last_token = 0

    def add(self, part: Capture, copy: StateCopy) -> Capture:
        """`part` with this copy of the state: in it if the whole state is small, else under a token to fetch it by."""
        if copy.num_bytes <= _INLINE_BYTES and not copy.is_part:
            return replace(part, shared_state=copy.made())
        with self._lock:  # else it might go into the collection that `fetch` is about to replace
            self._last_token += 1
            self._kept[self._last_token] = copy
            return replace(part, token=self._last_token, is_part=copy.is_part)

    def unmade(self) -> list[StateCopy]:
        """The copies that have to be made before the state changes."""
        with self._lock:
            return [copy for copy in self._kept.values() if not copy.is_made]

    def drop_landed(self, token: int | None) -> None:
        """Lets go of what the driver holds by now: that under `token`, and all before it."""
        with self._lock:
            self._kept = {each: kept for each, kept in self._kept.items() if token is None or each > token}

    def drop_unclaimed(self) -> None:
        """Drops copies that were not fetched: a newer one will take their place."""
        with self._lock:
            self._kept = {each: kept for each, kept in self._kept.items() if each == self._claimed}

    def claim(self, token: int) -> bool:
        """Says that it will be fetched, so that it has to stay; False if it is gone already."""
        with self._lock:
            if token not in self._kept:
                return False
            self._claimed = token
            return True

    def claimed(self, part: Capture) -> Capture:
        """`part`, whose copy will be fetched in any case: perhaps a file is to be written of it."""
        if part.token is not None:
            self.claim(part.token)
        return part

    def fetch(self, token: int) -> StateCopy:
        """The copy under this token. A request for one says that the earlier ones have arrived."""
        with self._lock:
            self._kept = {each: kept for each, kept in self._kept.items() if each >= token}
            self._claimed = token
            return self._kept[token]

    def clear(self) -> None:
        """Lets go of everything."""
        with self._lock:
            self._kept = {}


class MidCallSnapshots:
    """This rank's parts of the snapshots taken inside a call: the newest two, by the number of steps before them.

    Args:
        every: How many steps lie between two of them; None for none at all.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self._parts: dict[int, Capture] = {}
        self.newest = 0

    def is_due(self, num_steps: int) -> bool:
        """Tells whether one is to be taken after this many steps."""
        return self.every is not None and num_steps - self.newest >= self.every

    def keep(self, num_steps: int, part: Capture) -> None:
        """Keeps a new one, and of those before only the last."""
        self._parts = {number: self._parts[number] for number in (self.newest,) if number in self._parts}
        self._parts[num_steps] = part
        self.newest = num_steps

    def part(self, number: int) -> Capture | None:
        """The part with this number, if it is still kept."""
        return self._parts.get(number)

    def clear(self) -> None:
        """Another call, or another group."""
        self._parts, self.newest = {}, 0
