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
from raysgd.worker.ledger import Ledger

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


class StateCopies:
    """Takes the copies of one worker, and keeps them until the driver has fetched them, from another thread.

    Of the snapshots inside a call it keeps this rank's parts of the newest two, by the number of steps before them.

    Args:
        every: After how many steps of a training call the state is copied inside it; None for never.
        ledger: Where the time that copies take is booked.

    Attributes:
        every: The same.
        newest: The number of steps before the newest snapshot inside the running call; 0 where there is none.
        has_unmade: Whether a copy is still to be made, before the state changes.
    """

    def __init__(self, every: int | None, ledger: Ledger) -> None:
        self.every, self._ledger = every, ledger
        self._kept: dict[int, StateCopy] = {}  # by their tokens
        self._changing = threading.Lock()
        self._claimed: int | None = None  # what will be fetched, so that it has to stay
        self._last_token = 0
        self._usual_s: float | None = None
        self.has_unmade = False
        self._parts: dict[int, Capture] = {}
        self.newest = 0

    def after_call(self, state: Any, rank: int, landed_token: int | None) -> Capture:
        """Copy the state once, between two calls; the driver has that of `landed_token`, and all before it, by now.

        A large copy is made when the driver fetches it, or by `finish`; but for the first one, which says how long they
        take. Perhaps a file is to be written of it, so it stays until it is fetched.

        Args:
            state: A `ReplicaState`.
            rank: That of this worker.
            landed_token: None before the driver has any.
        """
        with self._ledger.copying():
            with self._changing:
                kept = self._kept.items()
                self._kept = {each: copy for each, copy in kept if landed_token is None or each > landed_token}
            copy = state.copy_for_driver(rank)
            if copy is not None and self._usual_s is None:
                self._made(copy)
            part = self._with(copy, Capture(state.own()))
            self._claimed = part.token or self._claimed
            self.has_unmade = copy is not None and not copy.is_made
            return replace(part, seconds=self._usual_s or 0.0) if self.has_unmade else part

    def inside_call(self, state: Any, rank: int, progress: Any) -> Capture:
        """Do the same inside a call that is so far, and at once; a copy that was not claimed gives way to this one."""
        with self._ledger.copying():
            with self._changing:
                self._kept = {each: copy for each, copy in self._kept.items() if each == self._claimed}
            copy = state.copy_for_driver(rank)
            if copy is not None:
                self._made(copy)
            return self._with(copy, Capture(state.own(), progress=progress))

    def _with(self, copy: StateCopy | None, part: Capture) -> Capture:
        """Return `part` with a copy: in it if the whole state is small, else under a token to fetch it by."""
        if copy is None:
            return part
        if copy.num_bytes <= _INLINE_BYTES and not copy.is_part:
            return replace(part, shared_state=copy.made())
        with self._changing:  # else it might go into the collection that `fetch` is about to replace
            self._last_token += 1
            self._kept[self._last_token] = copy
            return replace(part, token=self._last_token, is_part=copy.is_part)

    def _made(self, copy: StateCopy) -> Any:
        content = copy.made()
        self._usual_s = copy.seconds
        return content

    def unmade(self) -> list[StateCopy]:
        """Return the copies that have to be made before the state changes."""
        with self._changing:
            return [copy for copy in self._kept.values() if not copy.is_made]

    def finish(self) -> None:
        """Make what is still to be copied: the state is about to change."""
        self.has_unmade, unmade = False, self.unmade()
        if unmade:
            with self._ledger.copying():
                for copy in unmade:
                    self._made(copy)

    def fetch(self, token: int) -> Any:
        """Return the copy that `token` names. A request for one says that the earlier ones have arrived."""
        with self._changing:
            self._kept = {each: copy for each, copy in self._kept.items() if each >= token}
            self._claimed, copy = token, self._kept[token]
        return self._made(copy)

    # ------------------------------------------------------------------------------------ snapshots inside a call

    def is_due(self, num_steps: int) -> bool:
        """Return whether a snapshot is to be taken after so many steps of the running call."""
        return self.every is not None and num_steps - self.newest >= self.every

    def keep(self, num_steps: int, part: Capture) -> None:
        """Keep a new part, and of those before only the last."""
        self._parts = {number: self._parts[number] for number in (self.newest,) if number in self._parts}
        self._parts[num_steps] = part
        self.newest = num_steps

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return the part of the snapshot after so many steps, which will be fetched; None if it is not kept."""
        part = self._parts.get(number)
        if part is not None and part.token is not None:
            with self._changing:
                if part.token not in self._kept:
                    return None
                self._claimed = part.token
        return part

    def forget_call(self) -> None:
        """Forget the snapshots inside the call: another call begins, or another group."""
        self._parts, self.newest = {}, 0

    def clear(self) -> None:
        """Drop everything."""
        self.forget_call()
        with self._changing:
            self._kept = {}
