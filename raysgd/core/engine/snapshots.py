"""Snapshots: the training state that a restart restores, when it is copied, and which calls a restart must repeat.

A worker copies its state at the end of a call, and also between two steps of a call if the user wants such snapshots.
The copy is sent to the driver while the group already runs the next call or step. Until the copy arrives, the driver
retains all calls since the previous snapshot. If the copy is lost, these calls can be repeated from that snapshot.

Snapshots are stored on the driver's node, because an actor's return value may exist only on the actor's node and would
be lost with that node. If the state is sharded over the ranks, each shard is stored on two nodes (ADR 92).

ADR 4 explains why snapshots are taken after calls, why not after every call, and what is repeated instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.shared.interface import (
    Call,
    Capture,
    EverySeconds,
    GroupSpec,
    RegroupingReplica,
    Replica,
    method_of,
    nothing,
    taken_over,
)
from raysgd.core.engine.shared.types import GroupReport
from raysgd.core.engine.transfers import DividedValue, SharedValue, Transfer
from raysgd.exceptions import WorkersLostError

logger = logging.getLogger(__name__)


# Copying may take at most this fraction of the time. A snapshot costs about three times as much time as its copy,
# because the transfer to the driver slows down the next steps. Snapshots therefore cost at most 2 % of the time. See
# `examples/benchmarks/snapshot_cost.py`.
_SHARE = 0.006
_MAX_REPLAY_S = 30.0
_MAX_CALLS = 10_000  # largest number of retained calls, which keep their arguments in memory


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that has arrived in the driver.

    Attributes:
        shared_state: State that all ranks share, such as the model. A `DividedValue` if it is sharded over the ranks.
        rank_states: Each rank's own state, by rank.
        progress: Each rank's progress in the call during which the snapshot was taken. None if it was taken between
            calls.
        reference: Ray's reference to the shared state, if it came through the object store.
        version: Version of the training state. See `Snapshots`.
    """

    shared_state: Any
    rank_states: tuple[Any, ...]
    progress: tuple[Any, ...] | None = None
    reference: Any = None
    version: int = field(default=0, compare=False)

    def for_ranks(self, num_ranks: int) -> list[tuple[Any, ...]]:
        """Return the values that each rank of a new group restores in addition to the shared state.

        A rank restores its own state. From a snapshot taken inside a call, it also restores the progress of rank 0, and
        the progress of the old ranks whose metrics it takes over. The new group may have a different size.
        """
        own, progress = own_states(self.rank_states, num_ranks), self.progress
        if progress is None:
            return [(state,) for state in own]
        return [(state, progress[0], taken_over(progress, rank, num_ranks)) for rank, state in enumerate(own)]


def own_states(rank_states: Sequence[Any], num_ranks: int) -> list[Any]:
    """Return the own state that each rank of a new group restores.

    The state is None for ranks that did not exist in the old group.
    """
    return [*rank_states[:num_ranks], *[None] * (num_ranks - len(rank_states))]


@dataclass(frozen=True)
class NewestSnapshot:
    """The newest snapshot, which has arrived in the driver or is in transit. Any thread may use it.

    Attributes:
        snapshot: The snapshot. Without its shared state, if that is in transit.
        transfer: The transfer of the shared state. None if it has arrived in the driver.
        token: Identifies the shared state in the worker that sends it. None if no worker is sending it.
    """

    snapshot: Snapshot
    transfer: Transfer | None = None
    token: int | None = None

    @property
    def landed(self) -> Snapshot | None:
        """The snapshot, if it has arrived in the driver."""
        return self.snapshot if self.transfer is None else None

    def result(self, timeout_s: float | None = None) -> Snapshot:
        """Wait until the snapshot has arrived in the driver, and return it.

        Raises:
            TimeoutError: The snapshot is still in transit.
            WorkersLostError: The snapshot was lost, for example because the worker that sent it died.
        """
        if self.transfer is None:
            return self.snapshot
        try:
            state = self.transfer.result(timeout_s)
        except (TimeoutError, WorkersLostError):
            raise
        except Exception as error:  # Ray's error if the worker died, or an error that the worker raised
            raise WorkersLostError("The state was lost with its worker on its way to the driver.") from error
        stored = state if isinstance(state, SharedValue) else SharedValue(state, self.transfer.reference)
        return replace(self.snapshot, shared_state=stored.value, reference=stored.reference)


def is_due(every_s: EverySeconds, copy_s: float, since_s: float, replay_s: float, num_calls: int) -> bool:
    """Return True if the workers should copy their training state after a call.

    Args:
        every_s: Seconds between snapshots. "auto" spends at most 2% of the time on snapshots, but takes one anyway once
            a restart would have to repeat more than 30 s of calls. None takes no snapshots.
        copy_s: Seconds for which copying pauses the workers.
        since_s: Seconds from the last copy to the end of the call.
        replay_s: Seconds to repeat the calls since the last snapshot, including this call.
        num_calls: Number of calls since the last snapshot, including this call. With more than 10,000 calls, a copy is
            due in any case, unless `every_s` is None.
    """
    if every_s is None:
        return False
    if num_calls > _MAX_CALLS:
        return True
    if every_s != "auto":
        return since_s >= every_s
    return copy_s <= _SHARE * since_s or replay_s > _MAX_REPLAY_S


class SnapshotPace:
    """Records how long state copies and calls take, and decides when workers must copy their state.

    The decision is made before a call, because the request to copy is sent with the call. It is based on how long the
    last call of the same function took.

    Args:
        every_s: Seconds between snapshots, "auto" or None. See `is_due`.
        now: Clock, in seconds.
        heartbeat_s: A worker without a heartbeat for this many seconds counts as lost.
    """

    def __init__(self, every_s: EverySeconds, now: Callable[[], float], heartbeat_s: float = float("inf")) -> None:
        self._every_s, self._now, self._heartbeat_s = every_s, now, heartbeat_s
        self.copy_s: float | None = None
        self._taken_at = now()
        self._usual_s: dict[Any, float] = {}
        self._has_warned = False

    def note_call(self, function: Any, seconds: float) -> None:
        """Record how many seconds a call of `function` took. This is the estimate for the next call of `function`."""
        self._usual_s[function] = seconds

    def note_copy(self, seconds: float) -> None:
        """Record that the workers have just copied their state, and for how many seconds this paused them.

        Warn once if a copy takes longer than `heartbeat_s`.
        """
        self.copy_s, self._taken_at = seconds, self._now()
        if seconds > self._heartbeat_s and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "`heartbeat_s=%g` is shorter than a copy of the state, which took %.1f s, so a worker that is "
                "copying its state may be mistaken for a frozen worker. Use at least `heartbeat_s=%d`",
                self._heartbeat_s,
                seconds,
                int(3 * seconds) + 1,
            )

    def is_due(self, function: Any, uncovered_s: Sequence[float]) -> bool:
        """Return True if the state should be copied after the next call.

        Until the duration of a copy and of a call of `function` is known, this method returns True unless snapshots
        are switched off.

        Args:
            function: The next call's function.
            uncovered_s: How long each call since the last snapshot took.
        """
        usual_s = self._usual_s.get(function)
        if self.copy_s is None or usual_s is None:
            return self._every_s is not None
        since_s = self._now() - self._taken_at + usual_s
        return is_due(self._every_s, self.copy_s, since_s, sum(uncovered_s) + usual_s, len(uncovered_s) + 1)

    def words(self) -> str:
        """Return a description of how often snapshots are taken, for a trainer's status."""
        if self._every_s is None:
            return "switched off"
        if self._every_s != "auto":
            return f"every {self._every_s:g} s" if self._every_s else "after each call"
        if self.copy_s is None:
            return "after each call"
        every_s = min(self.copy_s / _SHARE, _MAX_REPLAY_S)
        return f"every {every_s:.2g} s, because a copy takes {self.copy_s:.2g} s"


class Snapshots:
    """Holds the newest snapshot that has arrived in the driver, and the calls completed since that snapshot was taken.

    Each change of the training state gives it a new version. A snapshot has the version that was copied.

    Args:
        spec: Settings of the worker group, including those for snapshots.
        now: Clock, in seconds.
        is_cut_off: Returns True if the program is about to end and Ray was stopped. Reading from Ray's object store
            would then end this process at once.

    Attributes:
        landed: The newest snapshot that has arrived in the driver.
        landed_token: Token of the newest copy from the workers that has arrived in the driver. None if the workers
            store no such copy.
        landed_at: Time at which `landed` arrived, or None.
        is_awaited: True if a caller needs the snapshot that is in transit. A restart must then wait longer for that
            snapshot.
        last_file: The last checkpoint file that was saved or loaded.
        pace: Decides after which calls a snapshot is due.
        keeps_replaced: True if a snapshot stays in memory after a newer one has replaced it. The state of a snapshot
            may lie in Ray's object store. If Ray was stopped, and this process frees that memory, Ray ends this
            process at once. So while the program is about to end, no snapshot is freed.
    """

    def __init__(
        self,
        spec: GroupSpec,
        now: Callable[[], float] = time.monotonic,
        is_cut_off: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spec, self._is_cut_off = spec, is_cut_off
        self.pace = SnapshotPace(spec.snapshot_every_s, now, spec.heartbeat_s)
        self.landed: Snapshot | None = None
        self.landed_token: int | None = None
        self.landed_at: float | None = None
        self._coming: NewestSnapshot | None = None
        self._calls: dict[int, tuple[Call, float]] = {}  # by version: a call since `landed`, and how long it took
        self._version = 0
        self._unrepeatable = 0  # version of the last change that cannot be repeated
        self._wanted = 0  # version that the workers must copy as soon as possible
        self._is_stale_for_ranks = False
        self.is_awaited = False
        self.last_file: str | None = None
        self.keeps_replaced = False
        self._replaced: list[Snapshot] = []

    @property
    def last_file_in_words(self) -> str:
        """A sentence about the last checkpoint file that was saved or loaded.

        Errors contain this sentence if no snapshot is left.
        """
        if self.last_file is None:
            return "No file was saved or loaded."
        return f"The last file is {self.last_file}: `load` it into a new trainer."

    @property
    def has_gap(self) -> bool:
        """True if the training state has changed since the snapshot `landed` in a way that cannot be repeated."""
        return self._unrepeatable > (0 if self.landed is None else self.landed.version)

    @property
    def must_follow(self) -> bool:
        """True if the workers must copy their state as soon as possible."""
        return self._wanted > self._newest_version

    @property
    def _newest_version(self) -> int:
        newest = self.landed if self._coming is None else self._coming.snapshot
        return 0 if newest is None else newest.version

    @property
    def uncovered_s(self) -> list[float]:
        """Seconds of each call completed since the newest snapshot was taken. That snapshot may still be in transit."""
        return [seconds for version, (_, seconds) in self._calls.items() if version > self._newest_version]

    @property
    def calls_since_s(self) -> float:
        """Total seconds of the calls that must be repeated after `landed` is restored."""
        return sum(seconds for _, seconds in self._calls.values())

    @property
    def is_inside(self) -> bool:
        """True if the newest snapshot in the driver was taken inside a call. The call can then resume from it."""
        return self.landed is not None and self.landed.progress is not None

    @property
    def calls_since(self) -> tuple[Call, ...]:
        """The calls to repeat after `landed` is restored, oldest first."""
        return tuple(call for call, _ in self._calls.values())

    @property
    def is_current(self) -> bool:
        """True if the training state has not changed since the newest snapshot was taken.

        That snapshot may still be in transit.
        """
        return self.shares_current and not self._is_stale_for_ranks

    @property
    def shares_current(self) -> bool:
        """True if the state that all ranks share, such as the model, has not changed since the newest snapshot."""
        return self.has_any and self._newest_version == self._version

    @property
    def has_any(self) -> bool:
        """True if any snapshot has arrived in the driver or is in transit."""
        return self.landed is not None or self.is_coming

    def completed(self, call: Call | None, seconds: float = 0.0) -> None:
        """Record that a call changed the training state. If it cannot be repeated exactly, a snapshot is due soon.

        Args:
            call: The call. None for a change that can never be repeated.
            seconds: How long the call took.
        """
        self.touch()
        if call is None:
            self._unrepeatable = self._version
            return
        self._calls[self._version] = call, seconds
        if not call.is_repeatable:
            self._wanted = self._version

    def newest(self) -> NewestSnapshot:
        """Return the newest snapshot. Call this method only if `has_any` is True.

        If the snapshot is in transit, a restart waits longer for it from now on, because the caller needs it.
        """
        if self._coming is None:
            assert self.landed is not None, "there is one"
            return NewestSnapshot(self.landed)
        self.is_awaited = True
        return self._coming

    def touch(self) -> None:
        """Record that the training state may have changed. The newest snapshot then no longer counts as current."""
        self._version += 1

    def touch_ranks(self) -> None:
        """Record that ranks' own states, such as random generators, may have changed since the newest snapshot."""
        self._is_stale_for_ranks = True

    def leave_call(self) -> None:
        """Record that an interrupted call will not resume.

        A snapshot taken inside the call then counts as taken after the call. If the snapshot is still in transit, it is
        discarded.
        """
        if self._coming is not None and self._coming.snapshot.progress is not None:
            self._lose_coming()
        if self.landed is not None and not self._calls:
            self.landed = replace(self.landed, progress=None)

    @property
    def is_coming(self) -> bool:
        """True if a snapshot is in transit to the driver.

        Until it arrives, no other snapshot is due. A call may still request a snapshot with `Call.captures`.
        """
        return self._coming is not None

    def take_captures(self, captures: Sequence[Capture], group: WorkerGroup, *, is_first: bool = False) -> None:
        """Create a snapshot from the copies that the ranks made of their training state.

        If the state that all ranks share, such as the model, was not sent with the captures, start to transfer it to
        the driver. Rank 0 stores this state. If the state is sharded, each rank stores one shard.

        Args:
            captures: Each rank's part of the snapshot, by rank.
            group: The group that took the captures.
            is_first: True if the ranks have just been set up. No call has changed their state yet.
        """
        self.poll()
        if is_first:
            version = min(self._calls, default=self._version + 1) - 1
            self._unrepeatable = min(self._unrepeatable, version)
        else:
            self.touch()  # a call that has not completed may have changed the state since the last copy
            version = self._version
        self._is_stale_for_ranks = False
        rank_states = tuple(capture.rank_state for capture in captures)
        source = captures[0]
        progress = tuple(capture.progress for capture in captures) if source.progress is not None else None
        taken = Snapshot(source.shared_state, rank_states, progress, version=version)
        if source.token is None:
            self._land(taken, None)
            return
        fetch = method_of(Replica.fetch)
        if source.is_part:
            transfer = group.fetch_parts(fetch, [capture.token for capture in captures])
        else:
            transfer = group.fetch(0, fetch, source.token)
        self._coming, self.is_awaited = NewestSnapshot(taken, transfer, source.token), False

    def poll(self, timeout_s: float | None = 0.0) -> None:
        """Wait for the snapshot in transit. If it arrives, store it in `landed`. If it was lost, discard it.

        Args:
            timeout_s: Longest time to wait. None waits without limit.
        """
        if self._coming is None:
            return
        if self._is_cut_off():
            logger.warning("a snapshot was lost in transit, because Ray was stopped")
            self._lose_coming()
            return
        try:
            snapshot = self._coming.result(timeout_s)
        except TimeoutError:
            return
        # This is not an error here, because the previous snapshot and the calls since then are still available.
        except WorkersLostError as error:
            reason = error.__cause__
            # Log the cause instead of Ray's error. The cause has only the message; the error also contains the remote
            # traceback.
            logger.warning(
                "a snapshot was lost in transit, so a restart may go back further: %s",
                getattr(reason, "cause", None) or reason,
            )
            self._lose_coming()
            return
        self._land(snapshot, self._coming.token)

    def drop_incoming(self) -> None:
        """Discard the snapshot in transit and `landed_token`, because the replicas that sent them have ended."""
        if self.is_coming:
            self._lose_coming()
        self.landed_token = None

    def adopt(self, snapshot: Snapshot) -> None:
        """Record that `snapshot` is the newest snapshot. Its state came from the driver, for example from a file."""
        self._is_stale_for_ranks = False
        self._land(replace(snapshot, version=self._version), self.landed_token)

    def forget_calls(self) -> None:
        """Discard the retained calls. A restart then continues from the last snapshot without repeating any calls."""
        self._calls.clear()

    def clear(self) -> None:
        """Discard the snapshots and the retained calls."""
        self._replace_landed(None)
        self._coming = self.landed_at = None
        self.forget_calls()

    def begin_again(self) -> None:
        """Discard the snapshots, the retained calls and `landed_token`.

        Called when the workers are about to be reset.
        """
        self.clear()
        self.landed_token, self._unrepeatable, self._is_stale_for_ranks = None, 0, False

    def _lose_coming(self) -> None:
        """Discard the snapshot in transit.

        If calls have completed since `landed` was taken, request a new snapshot soon.
        """
        self._coming = None
        self._wanted = self._version if self._calls else 0

    def _replace_landed(self, snapshot: Snapshot | None) -> None:
        if not self.keeps_replaced:
            self._replaced = []
        elif self.landed is not None:
            self._replaced.append(self.landed)
        self.landed = snapshot

    def _land(self, snapshot: Snapshot, token: int | None) -> None:
        self._replace_landed(snapshot)
        self._coming, self.landed_at, self.landed_token = None, time.monotonic(), token
        self._calls = {since: call for since, call in self._calls.items() if since > snapshot.version}

    # ------------------------------------------------------------------------------------------- around a call

    def is_due_after(self, call: Call) -> bool:
        """Return True if the workers should copy their state after `call`, which is about to run."""
        if call.captures:
            return True
        if not (self._spec.captures_after_calls and call.is_kept) or self.is_coming:
            return False
        is_forced = self.must_follow or not call.is_repeatable or not self.has_any
        return is_forced or self.pace.is_due(call.function, self.uncovered_s)

    def note_call(self, call: Call, seconds: float) -> None:
        """Record the completion of a call that changed the training state.

        Args:
            call: The completed call.
            seconds: How long the call took.
        """
        if self._spec.captures_after_calls:
            self.completed(call, seconds)
            self.pace.note_call(call.function, seconds)
        else:
            self.completed(None)

    def note_broken_off(self, call: Call, *, has_group: bool) -> None:
        """Record that a call was aborted. No snapshot contains the state that the surviving ranks are in now.

        Args:
            call: The aborted call.
            has_group: True if the worker group survived.
        """
        self.leave_call()
        if call.changes_state and has_group:
            self.touch()
            if self._spec.loses_state:
                self.completed(None)

    @property
    def is_overdue(self) -> bool:
        """True if a snapshot is needed now, because repeating the calls since the last snapshot would take too long."""
        return self._spec.snapshot_every_s == "auto" and not self.is_coming and sum(self.uncovered_s) > _MAX_REPLAY_S

    def is_known(self, *, has_group: bool) -> bool:
        """Return True if the newest snapshot contains the current training state. No new copy is then needed.

        Without a group, the current state is the state that new workers would start from. The newest snapshot contains
        this state unless calls must be repeated after the snapshot is restored.

        Args:
            has_group: True if there is a worker group.
        """
        is_whole = not has_group and self._spec.captures and not self.calls_since and not self.has_gap
        return self.is_current or (self.landed is not None and is_whole)

    # -------------------------------------------------------------------------------------------- after a failure

    def restore(self, group: WorkerGroup, on_wait: Callable[[], None]) -> GroupReport:
        """Restore the last snapshot in a group, then repeat the calls made since that snapshot.

        Return the report of the first call that has failed, or of the last call.
        """
        report, snapshot, is_inside = GroupReport(()), self.landed, self.is_inside
        if snapshot is not None:
            if isinstance(snapshot.shared_state, DividedValue):  # choose copies of the shards on live nodes
                parts = snapshot.shared_state.best_on({info.node_id for info in group.infos})
                snapshot = self.landed = replace(snapshot, shared_state=parts)
            restore = Replica.restore if snapshot.progress is None else RegroupingReplica.restore_inside
            rests, shared = snapshot.for_ranks(len(group)), group.share(snapshot.shared_state)
            args: dict[int, Sequence[Any]] = {rank: (shared[rank], *rest) for rank, rest in enumerate(rests)}
            if snapshot.progress is not None:  # all ranks read it from one stored copy, because it grows with the group
                everyones = group.share([each.for_others() for each in snapshot.progress])
                args = {rank: (*given, everyones[rank]) for rank, given in args.items()}
            report = group.on_replica(method_of(restore), args, on_wait=on_wait)
        if self._calls:
            logger.info("repeating the calls that the last snapshot does not cover: %s", self.restored_from())
        for call in self.calls_since if report.ok else ():
            function = call.resume if is_inside and call.resume is not None else call.function
            is_inside = False
            report = group.on_replica(function, call.on_its_ranks(call.args_for(group.worlds)), on_wait=on_wait)
            if not report.ok:
                break
        return report

    @property
    def is_lost(self) -> bool:
        """True if the training state is lost: it is in no snapshot, and repeating calls cannot recompute it."""
        is_nowhere = self._spec.captures and not self.has_any
        return self.has_gap and (self._spec.loses_state or is_nowhere)

    @property
    def is_only_in_workers(self) -> bool:
        """True if the training state exists only in the workers.

        The driver has no snapshot and cannot recompute the state.
        """
        return self.has_gap and self._spec.captures and self.landed is None and not self._spec.loses_state

    def restored_from(self) -> str:
        """Return a description, for logs, of the training state that new workers start from."""
        num_calls = len(self._calls)
        if num_calls:
            calls = "1 completed call" if num_calls == 1 else f"{num_calls} completed calls"
            return f"from the last snapshot, with {calls} since run again"
        if self.landed is None or self.landed.progress is None:
            return self._spec.words.restart_point
        return f"from a snapshot inside the call, {self.landed.progress[0]}"


def copy_call() -> Call:
    """Return a call that does nothing. The workers copy their training state after this call."""
    return Call(nothing, captures=True)
