"""Copies the training state of a worker, and stores the copies for the driver to fetch.

Some copies are taken between two calls, and some inside a training call (mid-call snapshots).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.engine.shared.replica import Capture
from raysgd.trainer.worker.ledger import Ledger

# A training state up to this size, in bytes, is sent to the driver with the answer to a call. A second call to fetch
# the state would take longer.
_INLINE_BYTES = 65536


@dataclass(frozen=True)
class StateCopy:
    """A copy of the training state, or of this rank's shard if the state is sharded over the ranks.

    Attributes:
        content: The copied state.
        num_bytes: Size of the copied state in bytes.
        is_part: True if the state is sharded, and this is one shard.
    """

    content: Any
    num_bytes: int
    is_part: bool = False


class StateCopies:
    """Copies the training state of one worker, and stores the copies for the driver to fetch.

    Each stored copy is identified by a number, its token. This object also stores this rank's parts of the two newest
    snapshots that were taken inside the running training call. A second thread fetches copies while the training thread
    runs.

    Args:
        every: Number of steps between snapshots inside a training call, or None for no such snapshots.
        ledger: Records how long copying takes.

    Attributes:
        every: Number of steps between snapshots inside a training call.
        newest: Number of steps of the running call after which its newest snapshot was taken. 0 if there is none.
    """

    def __init__(self, every: int | None, ledger: Ledger) -> None:
        self.every, self._ledger = every, ledger
        self._kept: dict[int, StateCopy] = {}  # the copies by token
        self._changing = threading.Lock()
        self._claimed: int | None = None  # token of the copy that the driver fetches next, or fetched last
        self._last_token = 0
        self._parts: dict[int, Capture] = {}
        self.newest = 0

    def after_call(self, state: Any, rank: int, landed_token: int | None) -> Capture:
        """Copy the training state between two calls, and return this rank's part of the snapshot.

        A large copy, or a copy of one shard of the state, is not in the returned part. It is stored here, so that the
        driver can fetch it.

        Args:
            state: The `ReplicaState` of this worker.
            rank: Rank of this worker.
            landed_token: Token of the last copy that has arrived in the driver. That copy and earlier copies are
                discarded. None if no copy has arrived.
        """
        with self._ledger.copying():
            with self._changing:
                kept = self._kept.items()
                self._kept = {each: copy for each, copy in kept if landed_token is None or each > landed_token}
            part = self._with(state.copy_for_driver(rank), Capture(state.own()))
            self._claimed = part.token or self._claimed
            return part

    def inside_call(self, state: Any, rank: int, progress: Any) -> Capture:
        """Copy the training state inside a training call, and return this rank's part of the snapshot.

        Older copies are discarded, except the one that the driver fetches next or has fetched last.

        Args:
            state: The `ReplicaState` of this worker.
            rank: Rank of this worker.
            progress: Progress of the training call, which is stored with the copy.
        """
        with self._ledger.copying():
            with self._changing:
                self._kept = {each: copy for each, copy in self._kept.items() if each == self._claimed}
            return self._with(state.copy_for_driver(rank), Capture(state.own(), progress=progress))

    def _with(self, copy: StateCopy | None, part: Capture) -> Capture:
        """Return this rank's part of a snapshot, with a copy of the shared state, or with the token of such a copy.

        A small copy is added directly. For a large copy, or a copy of one shard of the state, only the token is added;
        the copy itself is stored in this object. If `copy` is None, nothing is added.
        """
        if copy is None:
            return part
        if copy.num_bytes <= _INLINE_BYTES and not copy.is_part:
            return replace(part, shared_state=copy.content)
        # Without the lock, the new entry could get lost, because `fetch` in the second thread replaces the dictionary.
        with self._changing:
            self._last_token += 1
            self._kept[self._last_token] = copy
            return replace(part, token=self._last_token, is_part=copy.is_part)

    def fetch(self, token: int) -> Any:
        """Return the copy that this token identifies.

        Discard earlier copies, which the driver does not need anymore.
        """
        with self._changing:
            self._kept = {each: copy for each, copy in self._kept.items() if each >= token}
            self._claimed, copy = token, self._kept[token]
        return copy.content

    # ------------------------------------------------------------------------------------ mid-call snapshots

    def is_due(self, num_steps: int) -> bool:
        """Return True if a snapshot must be taken after `num_steps` steps of the running training call."""
        return self.every is not None and num_steps - self.newest >= self.every

    def keep(self, num_steps: int, part: Capture) -> None:
        """Store this rank's part of a snapshot inside the running call. Of earlier parts, keep only the newest.

        Args:
            num_steps: Number of steps of the call after which the snapshot was taken.
            part: This rank's part of the snapshot.
        """
        self._parts = {number: self._parts[number] for number in (self.newest,) if number in self._parts}
        self._parts[num_steps] = part
        self.newest = num_steps

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of the snapshot that was taken after `number` steps of the running call.

        If the part refers to a stored copy of the state, keep that copy until the driver fetches it. Return None if the
        part or this copy was discarded.
        """
        part = self._parts.get(number)
        if part is not None and part.token is not None:
            with self._changing:
                if part.token not in self._kept:
                    return None
                self._claimed = part.token
        return part

    def forget_call(self) -> None:
        """Discard this rank's parts of snapshots inside a call, because the call ends or the worker group changes."""
        self._parts, self.newest = {}, 0

    def clear(self) -> None:
        """Discard all copies of the training state."""
        self.forget_call()
        with self._changing:
            self._kept = {}
