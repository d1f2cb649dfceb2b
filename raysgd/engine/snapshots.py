"""The retry point: the state to which a group that lost workers goes back, and after which calls it is copied.

The bytes are on the driver's node, because a value that an actor returned may exist only on the node that was just
lost. Where the ranks divide their state, each part is on two nodes: ADR 92. A snapshot is copied once in the worker,
at the end of a call, and travels while the group already works on the next one. Until it has landed, the calls that it
covers are remembered, so that they can be run again from the snapshot before it.

Why snapshots are taken after calls, why they are throttled, and what is repeated instead: ADR 4.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.engine.group import WorkerGroup
from raysgd.engine.shared import replica
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.group_spec import EverySeconds, GroupSpec
from raysgd.engine.shared.replica import Capture
from raysgd.engine.transfers import Transfer
from raysgd.exceptions import WorkersLostError

logger = logging.getLogger(__name__)


_SHARE = 0.02  # of the time, for copies
_MAX_REPLAY_S = 30.0
_MAX_CALLS = 10_000  # each is kept, with its arguments


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


@dataclass(frozen=True)
class NewestSnapshot:
    """A snapshot, whether or not it has landed; for any thread.

    Attributes:
        landed: The snapshot, if it has.
        transfer: Else what brings what all ranks share.
        token: What that is called in the worker.
        rank_states: As in `Snapshot`.
        progress: As in `Snapshot`.
    """

    landed: Snapshot | None = None
    transfer: Transfer | None = None
    token: int | None = None
    rank_states: tuple[Any, ...] = ()
    progress: tuple[Any, ...] | None = None

    def result(self, timeout_s: float | None = None) -> Snapshot:
        """The snapshot, once it is in the driver.

        Raises:
            TimeoutError: It is still on its way.
            WorkersLostError: The worker that had it was lost.
        """
        if self.landed is not None:
            return self.landed
        assert self.transfer is not None, "there was one to wait for"
        try:
            state = self.transfer.result(timeout_s)
        except TimeoutError:
            raise
        except Exception as error:  # of Ray, for the death of the worker; or what its copy has come to there
            raise WorkersLostError("The state was lost with its worker on its way to the driver.") from error
        return Snapshot(state, self.rank_states, self.progress, self.transfer.reference)


def is_due(every_s: EverySeconds, copy_s: float, since_s: float, replay_s: float, num_calls: int) -> bool:
    """Return whether a snapshot is due after a call.

    Args:
        every_s: So many seconds after the last one. "auto": so rarely that copies take 2 % of the time at most, but
            before more than 30 s of calls would have to be repeated. None: never.
        copy_s: For how long a copy holds the workers up.
        since_s: Seconds from the last copy to the end of the call.
        replay_s: How long the calls since, and this one, would take again.
        num_calls: How many these are.
    """
    if every_s is None:
        return False
    if num_calls > _MAX_CALLS:
        return True
    if every_s != "auto":
        return since_s >= every_s
    return copy_s <= _SHARE * since_s or replay_s > _MAX_REPLAY_S


class SnapshotPace:
    """Follows what copies cost and how long calls take.

    Whether a copy is due is decided ahead of a call, because the call takes the request along. So its length is
    expected to be that of the last call of the same function.

    Args:
        every_s: When a snapshot is due, as for `is_due`.
        now: Time.
        heartbeat_s: For how long a worker may give no sign of life.
    """

    def __init__(self, every_s: EverySeconds, now: Callable[[], float], heartbeat_s: float = float("inf")) -> None:
        self._every_s, self._now, self._heartbeat_s = every_s, now, heartbeat_s
        self.copy_s: float | None = None
        self._taken_at = now()
        self._usual_s: dict[Any, float] = {}
        self._has_warned = False

    def note_call(self, function: Any, seconds: float) -> None:
        """Note how long a call took."""
        self._usual_s[function] = seconds

    def note_copy(self, seconds: float) -> None:
        """Note that the state was copied, and for how long that held the workers up."""
        self.copy_s, self._taken_at = seconds, self._now()
        if seconds > self._heartbeat_s and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "`heartbeat_s=%g` is shorter than a copy of the state, which took %.1f s: a worker that is busy with "
                "one may be taken for a frozen one. Use at least `heartbeat_s=%d`",
                self._heartbeat_s,
                seconds,
                int(3 * seconds) + 1,
            )

    def is_due(self, function: Any, replay_s: float, num_calls: int) -> bool:
        """Return whether to copy the state after a call that is about to be made.

        Args:
            function: What the call runs.
            replay_s: How long the calls since the last snapshot took.
            num_calls: How many these are.
        """
        usual_s = self._usual_s.get(function)
        if self.copy_s is None or usual_s is None:
            return self._every_s is not None
        since_s = self._now() - self._taken_at + usual_s
        return is_due(self._every_s, self.copy_s, since_s, replay_s + usual_s, num_calls + 1)

    def is_overdue(self, replay_s: float) -> bool:
        """Return whether one is due without a call, because so much would have to be repeated."""
        return self._every_s == "auto" and replay_s > _MAX_REPLAY_S

    def words(self) -> str:
        """Return what is due when, for the status of a trainer."""
        if self._every_s is None:
            return "switched off"
        if self._every_s != "auto":
            return f"every {self._every_s:g} s" if self._every_s else "after each call"
        if self.copy_s is None:
            return "after each call"
        every_s = min(self.copy_s / _SHARE, _MAX_REPLAY_S)
        return f"every {every_s:.2g} s, because a copy takes {self.copy_s:.2g} s"


class Snapshots:
    """Keeps the newest snapshot that has landed, and the calls completed since it was taken.

    Args:
        spec: Says whether and how often the state is copied.
        now: Time.

    Attributes:
        landed: The newest snapshot that the driver holds.
        landed_token: What it is called in the workers.
        landed_at: When it landed.
        is_awaited: Whether the one that is on its way is waited for, also when the workers are about to be ended.
        must_follow: Whether a copy has to follow as soon as it can.
        last_file: The last file that was saved or loaded.
        pace: After which calls one is due.
    """

    def __init__(self, spec: GroupSpec, now: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self.pace = SnapshotPace(spec.snapshot_every_s, now, spec.heartbeat_s)
        self.landed: Snapshot | None = None
        self.landed_token: int | None = None
        self.landed_at: float | None = None
        self._coming: NewestSnapshot | None = None
        self._num_covered = 0
        self._calls: list[Call] = []
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
        return self._num_covered if self.is_coming else 0

    @property
    def is_inside(self) -> bool:
        """True if `landed` was taken inside the call that follows those it covers: that one can continue."""
        return self.landed is not None and self.landed.progress is not None

    @property
    def calls_since(self) -> tuple[Call, ...]:
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
        return self.landed is not None or self.is_coming

    def completed(self, call: Call | None, seconds: float = 0.0, *, is_repeatable: bool = True) -> None:
        """Note that a call changed the state.

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
        return self._coming

    def touch(self) -> None:
        """Note that the state may have changed in a way that no call explains."""
        self._is_stale = True

    def touch_ranks(self) -> None:
        """Note the same of what each rank has for itself alone."""
        self._is_stale_for_ranks = True

    def leave_call(self) -> None:
        """Note that the running call was broken off for good: it will not continue from inside."""
        if self._coming is not None and self._coming.progress is not None:
            self._lose_coming()
        if self.landed is not None and not self._calls:
            self.landed = replace(self.landed, progress=None)

    @property
    def is_coming(self) -> bool:
        """True if a snapshot is on its way. Another one would overtake it, and under haste none would ever land."""
        return self._coming is not None

    def take_captures(
        self, captures: Sequence[Capture], fetch: Callable[[Any], Transfer], *, is_first: bool = False
    ) -> None:
        """Take over what the ranks captured after the last completed call.

        Args:
            captures: That of each rank.
            fetch: Starts a transfer: of what rank 0 has under a token, or of the parts that all have under theirs.
            is_first: Whether the ranks have just been set up: what they captured covers no call at all.
        """
        self.poll()
        num_covered = 0 if is_first else len(self._calls)
        self._is_stale, self._is_stale_for_ranks = len(self._calls) > num_covered, False
        self.must_follow = self._is_stale and self.must_follow
        self._num_gaps_coming = self._num_gaps
        rank_states = tuple(capture.rank_state for capture in captures)
        source = captures[0]
        progress = tuple(capture.progress for capture in captures) if source.progress is not None else None
        if source.token is None:
            self._land(Snapshot(source.shared_state, rank_states, progress), None, num_covered)
        else:
            wanted = [capture.token for capture in captures] if source.is_part else source.token
            self._coming = NewestSnapshot(None, fetch(wanted), source.token, rank_states, progress)
            self._num_covered, self.is_awaited = num_covered, False

    def poll(self, timeout_s: float | None = 0.0) -> None:
        """Let a snapshot land that has arrived, waiting for it up to `timeout_s` (None: as long as it takes)."""
        if self._coming is None:
            return
        try:
            snapshot = self._coming.result(timeout_s)
        except TimeoutError:
            return
        except WorkersLostError as error:  # the one before it, and the calls since, still stand
            reason = error.__cause__
            # Without the lines of the process that said so.
            logger.warning("a snapshot was lost in transit: %s", getattr(reason, "cause", None) or reason)
            self._lose_coming()
            return
        self._land(snapshot, self._coming.token, self._num_covered)

    def drop_incoming(self) -> None:
        """Note that the replicas are gone: what they were sending will not come, and new ones count tokens from 1."""
        if self.is_coming:
            self._lose_coming()
        self.landed_token = None

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over a state that the driver had before the workers did."""
        self._coming, self._is_stale, self._is_stale_for_ranks = None, False, False
        self.must_follow, self._num_gaps_coming = False, self._num_gaps
        self._land(snapshot, self.landed_token, len(self._calls))

    def forget_calls(self) -> None:
        """Leave `landed` as the state to go on from: the calls since are not to be run again."""
        self._calls.clear()
        self._call_s.clear()

    def clear(self) -> None:
        """Drop everything, once nothing in the driver works on it any more."""
        self.landed, self._coming = None, None
        self.forget_calls()

    def begin_again(self) -> None:
        """Drop everything, for workers that are about to be as new; what they send from now on is counted from 1."""
        self.clear()
        self.landed_token, self._is_stale, self._is_stale_for_ranks = None, False, False
        self._num_gaps_landed, self.must_follow = self._num_gaps, False

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

    # ------------------------------------------------------------------------------------------- around a call

    def is_due_after(self, call: Call) -> bool:
        """Return whether the workers are to copy their state after a call that is about to be made."""
        if call.captures:
            return True
        if not (self._spec.captures_after_calls and call.is_kept) or self.is_coming:
            return False
        is_forced = self.must_follow or not call.is_repeatable or not self.has_any
        return is_forced or self.pace.is_due(call.function, self.replay_s, self.num_uncovered)

    def note_call(self, call: Call, seconds: float) -> None:
        """Note that a call is completed that is kept in a copy, or to be repeated."""
        if self._spec.captures_after_calls:
            self.completed(call, seconds, is_repeatable=call.is_repeatable)
            self.pace.note_call(call.function, seconds)
        else:
            self.completed(None)

    def note_broken_off(self, call: Call, *, has_group: bool) -> None:
        """Note that a call ended half-way: ranks that were kept are in no state that a snapshot knows."""
        self.leave_call()
        if call.changes_state and has_group:
            self.touch()
            if self._spec.loses_state:
                self.completed(None)

    @property
    def is_overdue(self) -> bool:
        """True if a snapshot should be taken right now, because repeating what is not covered would take too long."""
        return not self.is_coming and self.pace.is_overdue(self.replay_s)

    def is_known(self, *, has_group: bool) -> bool:
        """Return whether the newest snapshot, if any, is the state as it is now, or all that is left of it.

        That is so where no worker is left that could know more, and no completed call is to be made up for: new workers
        would start from it. So there is no need to wait for any, which may never come.
        """
        is_whole = not has_group and self._spec.captures and not self.calls_since and not self.has_gap
        return self.is_current or (self.landed is not None and is_whole)

    def take_from(self, group: WorkerGroup, parts: Sequence[Capture], *, is_first: bool = False) -> None:
        """Take over what the ranks copied of their state; what rank 0 kept is fetched, or each rank's part."""

        def fetch(wanted: int | Sequence[int]) -> Transfer:
            if isinstance(wanted, int):
                return group.fetch(0, replica.fetch, wanted)
            return group.fetch_parts(replica.fetch, wanted)

        self.take_captures(parts, fetch, is_first=is_first)

    # -------------------------------------------------------------------------------------------- after a failure

    @property
    def is_lost(self) -> bool:
        """True if calls changed the state that no snapshot and no replay brings back."""
        is_nowhere = self._spec.captures and not self.has_any
        return self.has_gap and (self._spec.loses_state or is_nowhere)

    @property
    def is_only_in_workers(self) -> bool:
        """True if calls changed the state, and no snapshot of it has landed, as one would."""
        return self.has_gap and self._spec.captures and self.landed is None and not self._spec.loses_state

    def restored_from(self) -> str:
        """Return which state the next workers go on from, in words."""
        num_calls = len(self._calls)
        if num_calls:
            calls = "1 completed call" if num_calls == 1 else f"{num_calls} completed calls"
            return f"from the last snapshot, with {calls} since run again"
        if self.landed is None or self.landed.progress is None:
            return self._spec.words.restart_point
        return f"from a snapshot inside the call, {self.landed.progress[0]}"


def copy_call() -> Call:
    """A call that only lets the state be copied after it."""
    return Call(replica.nothing, captures=True)
