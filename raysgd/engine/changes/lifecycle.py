"""The group behind a trainer: which one there is now, how it ends, and what happened to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd._text.log_lines import Once
from raysgd.engine.decisions.group_events import EventKind, GroupHistory
from raysgd.engine.decisions.policies import ScalingPolicy
from raysgd.engine.decisions.resizing import ResizeCheck, Resizing, resizing
from raysgd.engine.group.group_hooks import GroupHooks
from raysgd.engine.group.group_spec import GroupSpec
from raysgd.engine.group.worker_group import WorkerGroup
from raysgd.engine.processes import replica_calls
from raysgd.engine.processes.outliving import keeper
from raysgd.engine.processes.resources import session
from raysgd.engine.processes.snapshots import SnapshotKeeper, Transfer
from raysgd.engine.processes.worker import WorkerAnswer
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.types import GroupReport
from raysgd.exceptions import TrainerShutdownError

_SUSPICION_S = 60.0


@dataclass(frozen=True)
class Clock:
    """Time, and what threads take turns by, as the engine sees them; tests bring their own.

    Attributes:
        monotonic: Seconds, on a clock that only goes forward.
        sleep: Waits.
        make_lock: Makes a reentrant lock for the threads of the driver.
        make_condition: Makes a condition variable for them.
    """

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    make_lock: Callable[[], Any] = threading.RLock
    make_condition: Callable[[], threading.Condition] = threading.Condition


@dataclass(frozen=True)
class ElasticRules:
    """The rules by which a group follows what happens in the cluster.

    Attributes:
        resize_check_s: How often a running call looks for room to grow; "auto" and None as in `resizing`.
        leaving_nodes: Asks for the nodes that will go away soon.
        keeps_joint_batch: Whether a step of fewer workers is the same step, for calls that survivors can continue.
    """

    resize_check_s: ResizeCheck = None
    leaving_nodes: Callable[[], frozenset[str]] = frozenset
    keeps_joint_batch: Callable[[], bool] = lambda: False


class Lifecycle:
    """Holds the group. Others start, rebuild and change it; here it ends.

    Args:
        spec: What a group is started from.
        scaling: Decides the number of workers.
        snapshots: The retry point.
        clock: Time; by default a wait ends when the trainer is stopped.
        release_timeout_s: How long to wait until Ray has taken the reservation back.
        rules: How the group follows the cluster.
        hooks: What the front end does when a group starts and ends.

    Attributes:
        group: The group; None before the first start, and after it was killed.
        starting: A group that is being started.
        clock: Time.
        history: What happened to the workers so far.
        session: The Ray session that the workers are in; None without workers outside this process.
        num_holds: How many stops inside a call were proposed; each has a number.
        num_short: With how many workers, at most, memory has run out; 0 if it never has.
        once: What was said already.
    """

    def __init__(
        self,
        spec: GroupSpec,
        scaling: ScalingPolicy,
        snapshots: SnapshotKeeper[Call],
        clock: Clock | None,
        release_timeout_s: float,
        rules: ElasticRules,
        hooks: GroupHooks,
    ) -> None:
        self.spec = spec
        self.scaling = scaling
        self.snapshots = snapshots
        self._stopped = threading.Event()
        self.clock = clock or Clock(sleep=self._stopped.wait)
        self.release_timeout_s = release_timeout_s
        self.rules = rules
        self.hooks = hooks
        self.history = GroupHistory(label=spec.words.label)
        self.group: WorkerGroup | None = None
        self.starting: WorkerGroup | None = None
        self.session: Any = None
        self._facts: list[Any] = []
        self.num_holds = self.num_short = 0
        self.once = Once()
        self._suspected: dict[str, float] = {}
        self._interrupted: int | None = None

    @property
    def num_workers(self) -> int:
        """The number of workers now; while there is no group, that which the next one is meant to have."""
        return self.group.num_workers if self.group is not None else self.scaling.max_workers

    @property
    def facts(self) -> list[Any]:
        """The facts that the replicas told of themselves when they were set up, by rank."""
        return self._facts

    @facts.setter
    def facts(self, facts: list[Any]) -> None:
        self._facts = facts
        kept_by = keeper()
        if kept_by is not None and self.group is not None:  # whatever changes the group changes them
            kept_by.note(self.group.to_keep(facts))

    @property
    def resizing(self) -> Resizing:
        """The way the number of workers changes, as of now."""
        keeps_joint_batch = self.spec.regroups and self.rules.keeps_joint_batch()
        return resizing(self.rules.resize_check_s, keeps_joint_batch, self.scaling.max_workers, self.num_short)

    @property
    def running(self) -> WorkerGroup:
        """The group, where there must be one."""
        assert self.group is not None, "there is no group at this moment"
        return self.group

    def now(self) -> float:
        """Seconds on the clock that all waiting goes by."""
        return self.clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits; raises `TrainerShutdownError` if the trainer was stopped meanwhile."""
        self.clock.sleep(seconds)
        self.check_active()

    @property
    def is_stopped(self) -> bool:
        """True if there are to be no workers any more."""
        return self._stopped.is_set()

    def refuse_starts(self) -> None:
        """From now on no group is started. From any thread."""
        self._stopped.set()

    def kill_workers(self) -> None:
        """From another thread, after `refuse_starts`: makes the call that is running return, wherever it is."""
        for group in (self.starting, self.group):
            if group is not None:
                try:
                    if not self.has_session_ended:
                        self.hooks.on_end(group)
                finally:
                    group.kill_workers()

    def interrupt(self, thread: int) -> None:
        """From another thread: ends the call that a thread is in as Ctrl-C inside it would; another one can follow."""
        self._interrupted = thread
        self.kill_workers()

    def check_interrupt(self) -> None:
        """Raises `KeyboardInterrupt` in a thread whose call is to end."""
        if self._interrupted == threading.get_ident():
            raise KeyboardInterrupt

    def end_interrupt(self) -> None:
        """The call is over: no one is to use the workers that were killed for it."""
        if self._interrupted is not None:
            self._interrupted = None
            self.kill_group()

    @property
    def has_session_ended(self) -> bool:
        """True if the workers ended with their Ray session; another one is none of this trainer's business."""
        return self.session is not None and self.session != session()

    def check_active(self) -> None:
        """Raises `TrainerShutdownError` after `refuse_starts` or the end of the Ray session.

        Raises `KeyboardInterrupt` after `interrupt`.
        """
        self.check_interrupt()
        if self.is_stopped:
            message = f"This trainer was shut down. {self.spec.words.when_shut_down}"
            raise TrainerShutdownError(message.rstrip())
        if self.has_session_ended:
            raise TrainerShutdownError(
                "The Ray session of this trainer has ended, for instance by `ray.shutdown()`, and its workers ended "
                "with it. Create a new trainer; what was saved can be loaded into it."
            )

    def kill_group(self, unless_local: bool = False) -> None:
        """Kills the processes; the next call starts new ones from the last snapshot.

        A worker that is the driver itself, alone, waits for no other: it can be kept as it is.
        """
        if self.group is None or (unless_local and self.group.is_driver_only):
            return
        group, self.group = self.group, None
        self.end_group(group)

    def end_call(self, cause: str, kind: EventKind = "ended", *, unless_local: bool = False) -> None:
        """Kill the group of a call that cannot go on, and record why."""
        began, group = self.now(), self.group
        self.kill_group(unless_local)
        if group is not None and self.group is None:
            self.record_end(kind, len(group), began, cause)

    def stop_group(self, *, force: bool) -> None:
        """Stops the group and drops all snapshots, for good; with `force`, without letting the workers close."""
        group, self.group = self.group, None
        self.snapshots.clear()
        if group is not None:
            self.end_group(group, force=force)

    def end_group(self, group: WorkerGroup, *, force: bool = True) -> None:
        """Stops a group, or with `force` kills it; the front end's hooks come first."""
        if self.has_session_ended:
            group.kill()  # what of it is in this process
            return
        end = group.kill if force else group.stop
        try:
            self.hooks.on_end(group)
            if not force:
                self.hooks.on_stop(group)
        finally:
            end(self.release_timeout_s)

    @property
    def nodes_to_avoid(self) -> frozenset[str]:
        """Nodes on which no new worker should be placed."""
        now = self.now()
        return frozenset(node for node, until in self._suspected.items() if until > now) | self.rules.leaving_nodes()

    def leaving_nodes_in_use(self) -> frozenset[str]:
        """Nodes with our workers that will go away soon, unless no worker would be left."""
        if self.group is None or self.group.is_driver_only:
            return frozenset()
        used = {info.node_id for info in self.group.infos}
        bound = {self.group.infos[0].node_id} if self.spec.use_local else set()  # the driver cannot leave
        leaving = (self.rules.leaving_nodes() & used) - bound
        return leaving if used - leaving else frozenset()

    def suspect(self, survivors: Sequence[int]) -> None:
        """Avoids for a while the nodes of ranks that went silent without a report of their death: perhaps all is gone.

        Ray tells of the death of a process at once, of that of a node half a minute later.
        """
        group = self.running
        silent = {group.infos[rank].node_id for rank in group.silent}
        until = self.now() + _SUSPICION_S
        self._suspected |= dict.fromkeys(silent - {group.infos[rank].node_id for rank in survivors}, until)

    def take_parts(self, parts: Sequence[Capture], *, is_first: bool = False) -> None:
        """Takes over what the ranks copied of their state; what rank 0 kept is fetched, or each rank's part."""
        group = self.running

        def fetch(wanted: int | Sequence[int]) -> Transfer:
            if isinstance(wanted, int):
                return group.fetch(0, replica_calls.fetch, wanted)
            return group.fetch_parts(replica_calls.fetch, wanted)

        self.snapshots.take(parts, fetch, is_first=is_first)

    def take_snapshot(self, report: GroupReport, *, is_first: bool = False) -> None:
        """Takes over the copies of the state that came with the answers."""
        answers: list[WorkerAnswer] = report.values
        captures = [answer.capture for answer in answers if answer.capture is not None]
        if captures:
            self.take_parts(captures, is_first=is_first)

    def restored_from(self) -> str:
        """Return which state the next workers go on from, in words."""
        snapshot = self.snapshots.landed
        num_calls = len(self.snapshots.calls_since)
        if num_calls:
            calls = "1 completed call" if num_calls == 1 else f"{num_calls} completed calls"
            return f"from the last snapshot, with {calls} since run again"
        if snapshot is None or snapshot.progress is None:
            return self.spec.words.restart_point
        return f"from a snapshot inside the call, {snapshot.progress[0]}"

    def record(
        self, kind: EventKind, old_size: int, began: float, cause: str, detail: str = "", num_kept: int = 0
    ) -> None:
        """Records what happened to the group, and logs it."""
        now = self.now()
        if kind != "started":
            self.history.last_resize = now
        self.history.record(kind, old_size, self.num_workers, now - began, cause, detail, num_kept)

    def record_end(self, kind: EventKind, old_size: int, began: float, cause: str) -> None:
        """Records that there are no workers any more."""
        self.history.record(kind, old_size, 0, self.now() - began, cause, self.spec.words.after_end)
