"""Copies of a worker's state, including snapshots inside a call, stored until the driver has fetched them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.engine.shared.replica import Capture
from raysgd.trainer.worker.ledger import Ledger

_INLINE_BYTES = 65536  # a state up to this size is sent with the answer, because a separate call would cost more


@dataclass(frozen=True)
class StateCopy:
    """A copy of a worker's state, or of this rank's part of the state if the state is sharded.

    Attributes:
        content: The copy.
        num_bytes: Size of the copy.
        is_part: True if the state is sharded, so that every rank has a part of it.
    """

    content: Any
    num_bytes: int
    is_part: bool = False


class StateCopies:
    """Takes copies of one worker's state and stores them until the driver has fetched them.

    Also stores this rank's parts of the two newest mid-call snapshots, keyed by the number of steps completed before
    each. A second thread fetches copies while the training thread runs.

    Args:
        every: Number of steps between copies of the state inside a training call; None for no copies.
        ledger: Records the time spent on copies.

    Attributes:
        every: Number of steps between copies, as passed to the constructor.
        newest: Number of steps that the running call had completed at its newest snapshot; 0 if it has no snapshot.
    """

    def __init__(self, every: int | None, ledger: Ledger) -> None:
        self.every, self._ledger = every, ledger
        self._kept: dict[int, StateCopy] = {}  # by token
        self._changing = threading.Lock()
        self._claimed: int | None = None  # token that the driver will fetch
        self._last_token = 0
        self._parts: dict[int, Capture] = {}
        self.newest = 0

    def after_call(self, state: Any, rank: int, landed_token: int | None) -> Capture:
        """Copy the state between two calls. Store the copy until the driver fetches it, for example to write a file.

        Args:
            state: A `ReplicaState`.
            rank: Rank of this worker.
            landed_token: Token of the last copy that the driver has received. That copy and earlier copies are
                discarded. None if the driver has not received any.
        """
        with self._ledger.copying():
            with self._changing:
                kept = self._kept.items()
                self._kept = {each: copy for each, copy in kept if landed_token is None or each > landed_token}
            part = self._with(state.copy_for_driver(rank), Capture(state.own()))
            self._claimed = part.token or self._claimed
            return part

    def inside_call(self, state: Any, rank: int, progress: Any) -> Capture:
        """Copy the state in the middle of a call. Discard older copies that the driver has not requested.

        Args:
            state: A `ReplicaState`.
            rank: Rank of this worker.
            progress: Progress of the call.
        """
        with self._ledger.copying():
            with self._changing:
                self._kept = {each: copy for each, copy in self._kept.items() if each == self._claimed}
            return self._with(state.copy_for_driver(rank), Capture(state.own(), progress=progress))

    def _with(self, copy: StateCopy | None, part: Capture) -> Capture:
        """Add a copy of the shared state to `part`: a small copy directly, a large copy as a token to fetch it by."""
        if copy is None:
            return part
        if copy.num_bytes <= _INLINE_BYTES and not copy.is_part:
            return replace(part, shared_state=copy.content)
        # Otherwise `fetch` in the second thread, which replaces the dict, could drop the new entry.
        with self._changing:
            self._last_token += 1
            self._kept[self._last_token] = copy
            return replace(part, token=self._last_token, is_part=copy.is_part)

    def fetch(self, token: int) -> Any:
        """Return the copy with this token, and discard earlier copies, which the driver has already received."""
        with self._changing:
            self._kept = {each: copy for each, copy in self._kept.items() if each >= token}
            self._claimed, copy = token, self._kept[token]
        return copy.content

    # ------------------------------------------------------------------------------------ mid-call snapshots

    def is_due(self, num_steps: int) -> bool:
        """Return True if a snapshot is due after `num_steps` steps of the running call."""
        return self.every is not None and num_steps - self.newest >= self.every

    def keep(self, num_steps: int, part: Capture) -> None:
        """Store this rank's part of the snapshot after `num_steps` steps. Of earlier parts, keep only the latest."""
        self._parts = {number: self._parts[number] for number in (self.newest,) if number in self._parts}
        self._parts[num_steps] = part
        self.newest = num_steps

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of the snapshot after `number` steps, or None if the part was discarded.

        If the part has a separate copy of shared state, retain that copy until the driver fetches it.
        """
        part = self._parts.get(number)
        if part is not None and part.token is not None:
            with self._changing:
                if part.token not in self._kept:
                    return None
                self._claimed = part.token
        return part

    def forget_call(self) -> None:
        """Discard the mid-call snapshots, because another call or another group starts."""
        self._parts, self.newest = {}, 0

    def clear(self) -> None:
        """Discard all copies."""
        self.forget_call()
        with self._changing:
            self._kept = {}
