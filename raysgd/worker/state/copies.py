"""Copies of the state on a worker: those that wait for the driver to fetch them, and those taken inside a call."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from raysgd.engine.shared.replica import Capture
from raysgd.worker.ledger import Ledger

_INLINE_BYTES = 65536  # a state up to this size travels with the answer; a separate call would cost more


@dataclass(frozen=True)
class StateCopy:
    """A copy of the state, or of this rank's part of a divided one.

    Attributes:
        content: What was copied.
        num_bytes: Its size.
        is_part: Whether every rank has a part.
    """

    content: Any
    num_bytes: int
    is_part: bool = False


class StateCopies:
    """Takes the copies of one worker, and keeps them until the driver has fetched them, from another thread.

    Of the snapshots inside a call it keeps this rank's parts of the newest two, by the number of steps before them.

    Args:
        every: After how many steps of a training call the state is copied inside it; None for never.
        ledger: Where the time that copies take is booked.

    Attributes:
        every: The same.
        newest: The number of steps before the newest snapshot inside the running call; 0 where there is none.
    """

    def __init__(self, every: int | None, ledger: Ledger) -> None:
        self.every, self._ledger = every, ledger
        self._kept: dict[int, StateCopy] = {}  # by their tokens
        self._changing = threading.Lock()
        self._claimed: int | None = None  # what will be fetched, so that it has to stay
        self._last_token = 0
        self._parts: dict[int, Capture] = {}
        self.newest = 0

    def after_call(self, state: Any, rank: int, landed_token: int | None) -> Capture:
        """Copy the state once, between two calls; the driver has that of `landed_token`, and all before it, by now.

        Perhaps a file is to be written of it, so it stays until it is fetched.

        Args:
            state: A `ReplicaState`.
            rank: That of this worker.
            landed_token: None before the driver has any.
        """
        with self._ledger.copying():
            with self._changing:
                kept = self._kept.items()
                self._kept = {each: copy for each, copy in kept if landed_token is None or each > landed_token}
            part = self._with(state.copy_for_driver(rank), Capture(state.own()))
            self._claimed = part.token or self._claimed
            return part

    def inside_call(self, state: Any, rank: int, progress: Any) -> Capture:
        """Do the same inside a call that is so far; a copy that was not claimed gives way to this one."""
        with self._ledger.copying():
            with self._changing:
                self._kept = {each: copy for each, copy in self._kept.items() if each == self._claimed}
            return self._with(state.copy_for_driver(rank), Capture(state.own(), progress=progress))

    def _with(self, copy: StateCopy | None, part: Capture) -> Capture:
        """Return `part` with a copy: in it if the whole state is small, else under a token to fetch it by."""
        if copy is None:
            return part
        if copy.num_bytes <= _INLINE_BYTES and not copy.is_part:
            return replace(part, shared_state=copy.content)
        with self._changing:  # else it might go into the collection that `fetch` is about to replace
            self._last_token += 1
            self._kept[self._last_token] = copy
            return replace(part, token=self._last_token, is_part=copy.is_part)

    def fetch(self, token: int) -> Any:
        """Return the copy that `token` names. A request for one says that the earlier ones have arrived."""
        with self._changing:
            self._kept = {each: copy for each, copy in self._kept.items() if each >= token}
            self._claimed, copy = token, self._kept[token]
        return copy.content

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
