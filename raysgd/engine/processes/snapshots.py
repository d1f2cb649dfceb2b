"""The retry point: the state to which a group that lost workers goes back.

The bytes are on the driver's node, because a value that an actor returned may exist only on the node that was just
lost. Where the ranks divide their state, each part is on two nodes: ADR 108. A snapshot is copied once in the worker,
at the end of a call, and travels while the group already works on the next one. Until it has landed, the calls that it
covers are remembered, so that they can be run again from the snapshot before it.

Why snapshots are taken after calls: ADR 4.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from raysgd.engine.shared.replica import Capture
from raysgd.exceptions import WorkersLostError

logger = logging.getLogger(__name__)

CallT = TypeVar("CallT")


@dataclass(frozen=True)
class Snapshot:
    """A state that the driver holds.

    Attributes:
        shared_state: What all ranks share. Where they divide it, `Parts`.
        rank_states: What each rank had for itself.
        progress: How far each rank was in the call in which it was taken; None when it was taken between calls.
        reference: Ray's reference to the shared state, where it came through the object store.
    """

    shared_state: Any
    rank_states: tuple[Any, ...]
    progress: tuple[Any, ...] | None = None
    reference: Any = None

    def for_ranks(self, num_ranks: int) -> list[tuple[Any, ...]]:
        """Return what each rank of a new group, of whatever size, takes of it beside the shared state.

        That is its own state, and where there is progress, that of rank 0 and of all whose metrics it counts.
        """
        own, progress = own_states(self.rank_states, num_ranks), self.progress
        if progress is None:
            return [(state,) for state in own]
        return [(state, progress[0], progress[rank::num_ranks]) for rank, state in enumerate(own)]


def own_states(rank_states: Sequence[Any], num_ranks: int) -> list[Any]:
    """The state of each rank; None for ranks that there were not."""
    return [*rank_states[:num_ranks], *[None] * (num_ranks - len(rank_states))]


class Transfer(Protocol):
    """A shared state on its way from a worker to the driver."""

    def result(self, timeout_s: float | None) -> Any:
        """The state; raises `TimeoutError` while it is on its way, anything else when it is lost."""


@dataclass(frozen=True)
class _ComingState:
    transfer: Transfer
    token: int | None
    rank_states: tuple[Any, ...]
    progress: tuple[Any, ...] | None
    needs_worker: bool = True

    def arrived(self, timeout_s: float | None) -> Snapshot:
        """The snapshot; raises what the transfer raises."""
        state = self.transfer.result(timeout_s)
        return Snapshot(state, self.rank_states, self.progress, getattr(self.transfer, "reference", None))


@dataclass(frozen=True)
class NewestSnapshot:
    """The newest snapshot, whether or not it has landed; for any thread.

    Attributes:
        landed: The snapshot, if it has.
    """

    landed: Snapshot | None
    _coming: _ComingState | None = None

    def result(self, timeout_s: float | None = None) -> Snapshot:
        """The snapshot, once it is in the driver.

        Raises:
            TimeoutError: It is still on its way.
            WorkersLostError: The worker that had it was lost.
        """
        if self.landed is not None:
            return self.landed
        assert self._coming is not None, "there was one to wait for"
        try:
            return self._coming.arrived(timeout_s)
        except TimeoutError:
            raise
        except Exception as error:
            raise WorkersLostError("The state was lost with its worker on its way to the driver.") from error


class SnapshotKeeper(Generic[CallT]):
    """Keeps the newest snapshot that has landed, and the calls completed since it was taken."""

    def __init__(self) -> None:
        self.landed: Snapshot | None = None
        self.landed_token: int | None = None
        self.landed_at: float | None = None
        self._coming: _ComingState | None = None
        self._num_covered = 0
        self._calls: list[CallT] = []
        self._call_s: list[float] = []
        self._is_stale = False
        self._is_stale_for_ranks = False
        self._num_gaps = self._num_gaps_landed = self._num_gaps_coming = 0
        self.is_awaited = False
        self.must_follow = False
        self.last_file: str | None = None

    @property
    def last_file_in_words(self) -> str:
        """The advice for somebody who has no snapshot."""
        if self.last_file is None:
            return "No file was saved or loaded."
        return f"The last file is {self.last_file}: `load` it into a new trainer."

    @property
    def has_gap(self) -> bool:
        """True if a call changed the state since `landed` that can not be run again."""
        return self._num_gaps > self._num_gaps_landed

    @property
    def replay_s(self) -> float:
        """The time that the calls took that no snapshot covers, landed or coming."""
        return sum(self._call_s[self._num_coming_covers :])

    @property
    def calls_since_s(self) -> float:
        """The time that the calls took that `landed` does not cover."""
        return sum(self._call_s)

    @property
    def num_uncovered(self) -> int:
        """The number of these calls."""
        return len(self._calls) - self._num_coming_covers

    @property
    def _num_coming_covers(self) -> int:
        return self._num_covered if self._coming is not None else 0

    @property
    def is_inside(self) -> bool:
        """True if `landed` was taken inside the call that follows those it covers: that one can continue."""
        return self.landed is not None and self.landed.progress is not None

    @property
    def calls_since(self) -> tuple[CallT, ...]:
        """The calls to run again after `landed` was restored, oldest first."""
        return tuple(self._calls)

    @property
    def is_current(self) -> bool:
        """True if the newest state is covered by a snapshot, landed or coming."""
        return self.shares_current and not self._is_stale_for_ranks

    @property
    def shares_current(self) -> bool:
        """True if that holds for what all ranks share; of what is a rank's own, newer random numbers may be missing."""
        return self.has_any and not self._is_stale

    @property
    def has_any(self) -> bool:
        """True if there is a snapshot at all, landed or coming."""
        return self.landed is not None or self._coming is not None

    def completed(self, call: CallT | None, seconds: float = 0.0, *, is_repeatable: bool = True) -> None:
        """Notes that a call changed the state.

        Args:
            call: The call; None for one that will never be run again.
            seconds: How long it took.
            is_repeatable: Whether it would do the same again. If not, a snapshot has to follow as soon as it can.
        """
        self._is_stale = True
        if call is None:
            self._num_gaps += 1
            return
        self._calls.append(call)
        self._call_s.append(seconds)
        self.must_follow = self.must_follow or not is_repeatable

    def newest(self) -> NewestSnapshot:
        """The newest snapshot. One that is on its way will be waited for, also when the workers are about to be ended.

        There has to be one.
        """
        if self._coming is None:
            return NewestSnapshot(self.landed)
        self.is_awaited = True
        return NewestSnapshot(None, self._coming)

    def touch(self) -> None:
        """Notes that the state may have changed in a way that no call explains."""
        self._is_stale = True

    def touch_ranks(self) -> None:
        """Notes the same of what each rank has for itself alone."""
        self._is_stale_for_ranks = True

    def leave_call(self) -> None:
        """Notes that the running call was broken off for good: it will not continue from inside."""
        if self._coming is not None and self._coming.progress is not None:
            self._lose_coming()
        if self.landed is not None and not self._calls:
            self.landed = replace(self.landed, progress=None)

    @property
    def is_coming(self) -> bool:
        """True if a snapshot is on its way. Another one would overtake it, and under haste none would ever land."""
        return self._coming is not None

    def take(self, captures: Sequence[Capture], fetch: Callable[[Any], Transfer], *, is_first: bool = False) -> None:
        """Takes over what the ranks captured after the last completed call.

        Args:
            captures: That of each rank.
            fetch: Starts a transfer: of what rank 0 has under a token, or of the parts that all have under theirs.
            is_first: Whether the ranks have just been set up: what they captured covers no call at all.
        """
        self.poll()
        num_covered = 0 if is_first else len(self._calls)
        self._is_stale, self._is_stale_for_ranks = len(self._calls) > num_covered, False
        self.must_follow = len(self._calls) > num_covered and self.must_follow
        self._num_gaps_coming = self._num_gaps
        rank_states = tuple(capture.rank_state for capture in captures)
        source = captures[0]
        progress = tuple(capture.progress for capture in captures) if source.progress is not None else None
        if source.token is None:
            self._land(Snapshot(source.shared_state, rank_states, progress), None, num_covered)
        else:
            wanted = [capture.token for capture in captures] if source.is_part else source.token
            self._await(_ComingState(fetch(wanted), source.token, rank_states, progress), num_covered)

    def poll(self, timeout_s: float | None = 0.0) -> None:
        """Lets a snapshot land that has arrived, waiting for it up to `timeout_s` (None: as long as it takes)."""
        if self._coming is None:
            return
        try:
            snapshot = self._coming.arrived(timeout_s)
        except TimeoutError:
            return
        except Exception as error:  # lost with its worker: the one before it, and the calls since, still stand
            reason = getattr(error, "cause", None) or error  # without the lines of the process that said so
            logger.warning("a snapshot was lost in transit: %s", reason)
            self._lose_coming()
            return
        self._land(snapshot, self._coming.token, self._num_covered)

    def drop_incoming(self) -> None:
        """Notes that the replicas are gone: what they were sending will not come, and new ones count tokens from 1."""
        if self._coming is not None and not self._coming.needs_worker:
            self.poll(timeout_s=None)
        if self._coming is not None:
            self._lose_coming()
        self.landed_token = None

    def adopt(self, snapshot: Snapshot) -> None:
        """Takes over a state that the driver had before the workers did."""
        self._coming, self._is_stale, self._is_stale_for_ranks = None, False, False
        self.must_follow, self._num_gaps_coming = False, self._num_gaps
        self._land(snapshot, self.landed_token, len(self._calls))

    def expect(self, transfer: Transfer, rank_states: tuple[Any, ...], call: CallT) -> None:
        """Takes over a state that the driver had before the workers did, and that it is still storing.

        Args:
            transfer: Brings it; no worker has to live for that.
            rank_states: What each rank has for itself.
            call: What brought the state to the workers; is run again after a loss if the transfer fails.
        """
        self.completed(call)
        self._await(_ComingState(transfer, self.landed_token, rank_states, None, needs_worker=False), len(self._calls))
        self._num_gaps_coming = self._num_gaps
        self.must_follow = self._is_stale = self._is_stale_for_ranks = False

    def forget_calls(self) -> None:
        """Leaves `landed` as the state to go on from: the calls since are not to be run again."""
        self._calls.clear()
        self._call_s.clear()

    def clear(self) -> None:
        """Drops everything, once nothing in the driver works on it any more."""
        if self._coming is not None and not self._coming.needs_worker:
            self.poll(timeout_s=None)
        self.landed, self._coming = None, None
        self._calls.clear()
        self._call_s.clear()

    def begin_again(self) -> None:
        """Drops everything, for workers that are about to be as new; what they send from now on is counted from 1."""
        self.clear()
        self.landed_token, self._is_stale, self._is_stale_for_ranks = None, False, False
        self._num_gaps_landed, self.must_follow = self._num_gaps, False

    def _await(self, coming: _ComingState, num_covered: int) -> None:
        self._coming, self._num_covered, self.is_awaited = coming, num_covered, False

    def _lose_coming(self) -> None:
        """Open again what it covered: a snapshot should follow soon, whatever calls these were."""
        self._coming, self._is_stale = None, True
        self.must_follow = bool(self._calls)

    def _land(self, snapshot: Snapshot, token: int | None, num_covered: int) -> None:
        self.landed, self._coming = snapshot, None
        self.landed_at = time.monotonic()
        self.landed_token = token
        self._num_gaps_landed = self._num_gaps_coming
        del self._calls[:num_covered], self._call_s[:num_covered]
