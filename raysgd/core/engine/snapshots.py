"""Snapshots: the state that a restart restores, when it is copied, and which calls have to be repeated after it.

Snapshots are kept on the driver's node, because an object that an actor returned may exist only on the actor's node,
which may be the one that was lost. If the ranks divide their state, each part is kept on two nodes (ADR 92). The worker
copies its state once, at the end of a call. The copy is sent while the group already runs the next call. Until it
arrives, the calls that it covers are remembered, so that they can be repeated from the snapshot before.

ADR 4 explains why snapshots are taken after calls, why not after every call, and what is repeated instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.shared import replica
from raysgd.core.engine.shared.call import Call
from raysgd.core.engine.shared.group_spec import EverySeconds, GroupSpec
from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.transfers import Transfer
from raysgd.exceptions import WorkersLostError

logger = logging.getLogger(__name__)


_SHARE = 0.02  # largest share of the time that copies may take
_MAX_REPLAY_S = 30.0
_MAX_CALLS = 10_000  # remembered calls, which hold on to their arguments


@dataclass(frozen=True)
class Snapshot:
    """A state that the driver holds.

    Attributes:
        shared_state: State that all ranks share; if they divide it, a `DividedValue`.
        rank_states: State that only one rank has, by rank.
        progress: Progress of each rank in the call in which the snapshot was taken; None if it was taken between calls.
        reference: Ray's reference to the shared state, if that came through the object store.
    """

    shared_state: Any
    rank_states: tuple[Any, ...]
    progress: tuple[Any, ...] | None = None
    reference: Any = None

    def for_ranks(self, num_ranks: int) -> list[tuple[Any, ...]]:
        """Return what each rank of a new group, of any size, restores in addition to the shared state.

        That is the rank's own state. For a mid-call snapshot it is also the progress of rank 0, and the progress of the
        ranks whose metrics this rank counts.
        """
        own, progress = own_states(self.rank_states, num_ranks), self.progress
        if progress is None:
            return [(state,) for state in own]
        return [(state, progress[0], progress[rank::num_ranks]) for rank, state in enumerate(own)]


def own_states(rank_states: Sequence[Any], num_ranks: int) -> list[Any]:
    """Return the own state of each rank; None for ranks that did not exist when the snapshot was taken."""
    return [*rank_states[:num_ranks], *[None] * (num_ranks - len(rank_states))]


@dataclass(frozen=True)
class NewestSnapshot:
    """A snapshot that has arrived or is on its way. Any thread may use it.

    Attributes:
        landed: The snapshot, if it has arrived.
        transfer: Otherwise the transfer of the shared state.
        token: The worker's token for that state.
        rank_states: As in `Snapshot`.
        progress: As in `Snapshot`.
    """

    landed: Snapshot | None = None
    transfer: Transfer | None = None
    token: int | None = None
    rank_states: tuple[Any, ...] = ()
    progress: tuple[Any, ...] | None = None

    def result(self, timeout_s: float | None = None) -> Snapshot:
        """Return the snapshot, once it is in the driver.

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
        except Exception as error:  # Ray raises it for the death of the worker, or the worker for its copy
            raise WorkersLostError("The state was lost with its worker on its way to the driver.") from error
        return Snapshot(state, self.rank_states, self.progress, self.transfer.reference)


def is_due(every_s: EverySeconds, copy_s: float, since_s: float, replay_s: float, num_calls: int) -> bool:
    """Return True if a snapshot is due after a call.

    Args:
        every_s: Seconds between snapshots. "auto": so rarely that copies take at most 2% of the time, but before more
            than 30 s of calls would have to be repeated. None: never.
        copy_s: How long a copy stops the workers.
        since_s: Seconds from the last copy to the end of the call.
        replay_s: How long it would take to repeat the calls since then, including this one.
        num_calls: Number of these calls.
    """
    if every_s is None:
        return False
    if num_calls > _MAX_CALLS:
        return True
    if every_s != "auto":
        return since_s >= every_s
    return copy_s <= _SHARE * since_s or replay_s > _MAX_REPLAY_S


class SnapshotPace:
    """Measures copies and calls, and decides when a copy is due.

    It decides before a call, because the call carries the request to copy. So it expects the call to take as long as
    the last call of the same function.

    Args:
        every_s: When a snapshot is due, as for `is_due`.
        now: Clock, in seconds.
        heartbeat_s: A worker that sends no heartbeat for so long counts as lost.
    """

    def __init__(self, every_s: EverySeconds, now: Callable[[], float], heartbeat_s: float = float("inf")) -> None:
        self._every_s, self._now, self._heartbeat_s = every_s, now, heartbeat_s
        self.copy_s: float | None = None
        self._taken_at = now()
        self._usual_s: dict[Any, float] = {}
        self._has_warned = False

    def note_call(self, function: Any, seconds: float) -> None:
        """Record how long a call took."""
        self._usual_s[function] = seconds

    def note_copy(self, seconds: float) -> None:
        """Record a copy of the state, and how long it stopped the workers."""
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
        """Return True if the state should be copied after a call that is about to be made.

        Args:
            function: The function of the call.
            replay_s: How long the calls since the last snapshot took.
            num_calls: Number of these calls.
        """
        usual_s = self._usual_s.get(function)
        if self.copy_s is None or usual_s is None:
            return self._every_s is not None
        since_s = self._now() - self._taken_at + usual_s
        return is_due(self._every_s, self.copy_s, since_s, replay_s + usual_s, num_calls + 1)

    def is_overdue(self, replay_s: float) -> bool:
        """Return True if a copy is due even without a call, because it would take too long to repeat the last calls."""
        return self._every_s == "auto" and replay_s > _MAX_REPLAY_S

    def words(self) -> str:
        """Return in words how often a snapshot is taken, for the status of a trainer."""
        if self._every_s is None:
            return "switched off"
        if self._every_s != "auto":
            return f"every {self._every_s:g} s" if self._every_s else "after each call"
        if self.copy_s is None:
            return "after each call"
        every_s = min(self.copy_s / _SHARE, _MAX_REPLAY_S)
        return f"every {every_s:.2g} s, because a copy takes {self.copy_s:.2g} s"


class Snapshots:
    """Keeps the newest snapshot that has arrived, and the calls completed since it was taken.

    Args:
        spec: Says if and how often the state is copied.
        now: Clock, in seconds.

    Attributes:
        landed: The newest snapshot that the driver holds.
        landed_token: The workers' token for it.
        landed_at: When it arrived.
        is_awaited: True if the snapshot on its way is waited for even before the workers are stopped.
        must_follow: True if a copy has to be taken as soon as possible.
        last_file: The last file that was saved or loaded.
        pace: Decides after which calls a snapshot is due.
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
        """What to tell a user who has no snapshot."""
        if self.last_file is None:
            return "No file was saved or loaded."
        return f"The last file is {self.last_file}: `load` it into a new trainer."

    @property
    def has_gap(self) -> bool:
        """True if a call since `landed` changed the state and cannot be repeated."""
        return self._num_gaps > self._num_gaps_landed

    @property
    def replay_s(self) -> float:
        """Total time of the calls that no snapshot covers, neither `landed` nor one on its way."""
        return sum(self._call_s[self._num_coming_covers :])

    @property
    def calls_since_s(self) -> float:
        """Total time of the calls that `landed` does not cover."""
        return sum(self._call_s)

    @property
    def num_uncovered(self) -> int:
        """Number of calls that no snapshot covers, neither `landed` nor one on its way."""
        return len(self._calls) - self._num_coming_covers

    @property
    def _num_coming_covers(self) -> int:
        return self._num_covered if self.is_coming else 0

    @property
    def is_inside(self) -> bool:
        """True if `landed` was taken inside the first call that it does not cover. That call can continue from it."""
        return self.landed is not None and self.landed.progress is not None

    @property
    def calls_since(self) -> tuple[Call, ...]:
        """The calls to repeat after `landed` is restored, oldest first."""
        return tuple(self._calls)

    @property
    def is_current(self) -> bool:
        """True if a snapshot, landed or on its way, has the newest state."""
        return self.shares_current and not self._is_stale_for_ranks

    @property
    def shares_current(self) -> bool:
        """True if a snapshot has the newest shared state. The newest states of single ranks may be missing."""
        return self.has_any and not self._is_stale

    @property
    def has_any(self) -> bool:
        """True if there is a snapshot, landed or on its way."""
        return self.landed is not None or self.is_coming

    def completed(self, call: Call | None, seconds: float = 0.0, *, is_repeatable: bool = True) -> None:
        """Note that a call changed the state.

        Args:
            call: The call; None if it can never be repeated.
            seconds: How long it took.
            is_repeatable: False if repeating it may give another result. A snapshot then has to follow as soon as
                possible.
        """
        self._is_stale = True
        if call is None:
            self._num_gaps += 1
            return
        self._calls.append(call)
        self._call_s.append(seconds)
        self.must_follow = self.must_follow or not is_repeatable

    def newest(self) -> NewestSnapshot:
        """Return the newest snapshot; there has to be one.

        If it is on its way, it is waited for from now on, even before the workers are stopped.
        """
        if self._coming is None:
            return NewestSnapshot(self.landed)
        self.is_awaited = True
        return self._coming

    def touch(self) -> None:
        """Note that the state may have changed outside of any call."""
        self._is_stale = True

    def touch_ranks(self) -> None:
        """Note that the own states of ranks may have changed outside of any call."""
        self._is_stale_for_ranks = True

    def leave_call(self) -> None:
        """Note that the interrupted call will not continue, so that no snapshot counts as taken inside it."""
        if self._coming is not None and self._coming.progress is not None:
            self._lose_coming()
        if self.landed is not None and not self._calls:
            self.landed = replace(self.landed, progress=None)

    @property
    def is_coming(self) -> bool:
        """True if a snapshot is on its way. No other is taken then, because hurried snapshots would never arrive."""
        return self._coming is not None

    def take_captures(
        self, captures: Sequence[Capture], fetch: Callable[[Any], Transfer], *, is_first: bool = False
    ) -> None:
        """Take a snapshot from the captures of the ranks after the last completed call.

        Args:
            captures: The capture of each rank.
            fetch: Starts a transfer: of rank 0's state by its token, or of all ranks' parts by their tokens.
            is_first: True if the ranks have just been set up, so that the snapshot covers no call.
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
        """Take the snapshot on its way if it has arrived. Wait for it up to `timeout_s`; None waits without limit."""
        if self._coming is None:
            return
        try:
            snapshot = self._coming.result(timeout_s)
        except TimeoutError:
            return
        except WorkersLostError as error:  # the previous snapshot, and the calls since then, are still there
            reason = error.__cause__
            # The cause has the message without the remote traceback.
            logger.warning("a snapshot was lost in transit: %s", getattr(reason, "cause", None) or reason)
            self._lose_coming()
            return
        self._land(snapshot, self._coming.token, self._num_covered)

    def drop_incoming(self) -> None:
        """Note that the replicas have ended: what they were sending is lost, and new ones count tokens from 1."""
        if self.is_coming:
            self._lose_coming()
        self.landed_token = None

    def adopt(self, snapshot: Snapshot) -> None:
        """Use a state that the driver had before the workers did, such as a loaded file, as the newest snapshot."""
        self._coming, self._is_stale, self._is_stale_for_ranks = None, False, False
        self.must_follow, self._num_gaps_coming = False, self._num_gaps
        self._land(snapshot, self.landed_token, len(self._calls))

    def forget_calls(self) -> None:
        """Keep `landed` as the state to continue from, without repeating the calls since then."""
        self._calls.clear()
        self._call_s.clear()

    def clear(self) -> None:
        """Drop everything, when nothing in the driver uses it any more."""
        self.landed, self._coming = None, None
        self.forget_calls()

    def begin_again(self) -> None:
        """Drop everything, because the workers are about to be reset. New replicas count tokens from 1."""
        self.clear()
        self.landed_token, self._is_stale, self._is_stale_for_ranks = None, False, False
        self._num_gaps_landed, self.must_follow = self._num_gaps, False

    def _lose_coming(self) -> None:
        """Give up the snapshot on its way. The calls that it covered need another one soon."""
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
        """Return True if the workers should copy their state after a call that is about to be made."""
        if call.captures:
            return True
        if not (self._spec.captures_after_calls and call.is_kept) or self.is_coming:
            return False
        is_forced = self.must_follow or not call.is_repeatable or not self.has_any
        return is_forced or self.pace.is_due(call.function, self.replay_s, self.num_uncovered)

    def note_call(self, call: Call, seconds: float) -> None:
        """Note that a call whose effect must be kept, by a copy or by repeating it, is complete."""
        if self._spec.captures_after_calls:
            self.completed(call, seconds, is_repeatable=call.is_repeatable)
            self.pace.note_call(call.function, seconds)
        else:
            self.completed(None)

    def note_broken_off(self, call: Call, *, has_group: bool) -> None:
        """Note that a call ended half-way: the surviving ranks have a state that is in no snapshot."""
        self.leave_call()
        if call.changes_state and has_group:
            self.touch()
            if self._spec.loses_state:
                self.completed(None)

    @property
    def is_overdue(self) -> bool:
        """True if a snapshot should be taken right now, because repeating the last calls would take too long."""
        return not self.is_coming and self.pace.is_overdue(self.replay_s)

    def is_known(self, *, has_group: bool) -> bool:
        """Return True if the newest snapshot is the current state, or all that is left of it.

        The latter holds if no worker is left, and no completed call has to be repeated. New workers would start from
        this snapshot, so there is no need to wait for them.
        """
        is_whole = not has_group and self._spec.captures and not self.calls_since and not self.has_gap
        return self.is_current or (self.landed is not None and is_whole)

    def take_from(self, group: WorkerGroup, parts: Sequence[Capture], *, is_first: bool = False) -> None:
        """Take a snapshot from copies of the ranks. Fetch what rank 0 kept, or each rank's part."""

        def fetch(wanted: int | Sequence[int]) -> Transfer:
            if isinstance(wanted, int):
                return group.fetch(0, replica.fetch, wanted)
            return group.fetch_parts(replica.fetch, wanted)

        self.take_captures(parts, fetch, is_first=is_first)

    # -------------------------------------------------------------------------------------------- after a failure

    @property
    def is_lost(self) -> bool:
        """True if calls changed the state, and neither a snapshot nor repeating them can bring it back."""
        is_nowhere = self._spec.captures and not self.has_any
        return self.has_gap and (self._spec.loses_state or is_nowhere)

    @property
    def is_only_in_workers(self) -> bool:
        """True if calls changed the state, and no snapshot has landed although the workers do copy their state."""
        return self.has_gap and self._spec.captures and self.landed is None and not self._spec.loses_state

    def restored_from(self) -> str:
        """Return in words what state the next workers start from."""
        num_calls = len(self._calls)
        if num_calls:
            calls = "1 completed call" if num_calls == 1 else f"{num_calls} completed calls"
            return f"from the last snapshot, with {calls} since run again"
        if self.landed is None or self.landed.progress is None:
            return self._spec.words.restart_point
        return f"from a snapshot inside the call, {self.landed.progress[0]}"


def copy_call() -> Call:
    """Return a call whose only purpose is the copy of the state after it."""
    return Call(replica.nothing, captures=True)
