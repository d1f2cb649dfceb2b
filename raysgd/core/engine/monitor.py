"""Watches a running call: kills silent workers, collects mid-call snapshots, and makes ranks stop between two steps.

The driver calls `poll` about ten times a second while it waits for the call. Once per round of about a second, `poll`
requests a heartbeat from the second thread of each worker. That thread answers even while the worker runs a step. A
call that is shorter than a round is not slowed down.

ADR 11 explains why all ranks agree on a step before they stop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.core.engine.gathering import LivenessCheck, quiet_s
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.lifecycle import Lifecycle
from raysgd.core.engine.shared import interface
from raysgd.core.engine.shared.interface import Call, GroupEvent, RegroupingReplica, method_of
from raysgd.core.engine.shared.types import Answered, Heartbeat
from raysgd.core.engine.worker import WorkerProcess
from raysgd.core.text.log_lines import Once, named
from raysgd.exceptions import WorkersLostError

logger = logging.getLogger(__name__)

_FASTEST_ROUND_S = 0.25  # length of a round if snapshots are taken during the call or if workers are about to join
_FIRST_ROUND_S = 0.2  # length of the first round of a call, which is short because most calls are short
_POLL_S = 0.2
_MOST_STACKS = 8
_REPORT_S = 1.0  # how long a report waits for stacks and heartbeats; ranks without an answer are listed as such
NODES_S = 2.0  # seconds between two questions which nodes are going away
_HOLD_AHEAD_S = 0.05
_MIN_MARGIN = 2

ROOM = "there is room for more workers"
LEAVING = "a node is going away"
LEFT = "the call is left"


class Monitor:
    """Watches the calls of a trainer, one after the other, and the changes to its group between calls.

    Args:
        lifecycle: Holds the worker group.

    Attributes:
        is_on: True while a call or a change to the group is watched. Callers set it to False once nothing runs.
        heartbeats: The last heartbeat of each rank in the current call or group change.
        reason: Why the ranks were asked to stop between two steps.
        is_leaving: True if all ranks have agreed to stop so that the call ends early.
        observer: Called once per round while a call or a change to the group is watched, and once after a call raised
            an error. May be None. If the driver is the only worker, it is called only after errors.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle, self._snapshots = lifecycle, lifecycle.snapshots
        self._num_holds = 0  # number of the last proposal to stop at a step
        self._once = Once()
        self.observer: Callable[[], None] | None = None
        self.watch()
        self.is_on = False

    def watch(self, call: Call | None = None, *, is_of_restore: bool = False) -> None:
        """Start watching a call. If `call` is None, start watching a group that changes or waits between calls.

        Args:
            call: The call.
            is_of_restore: True to watch the restore of a snapshot and the repeated calls that follow. No snapshots are
                then taken, because a snapshot counts as covering all of these calls. A restart from such a snapshot
                would skip the calls that had not been repeated yet.
        """
        self._is_of_restore = is_of_restore
        now, of_call, can_hold = self._lifecycle.now(), call is not None, call is not None and call.resume is not None
        self.is_on, self._is_of_call, self._can_hold = True, of_call, can_hold
        self._divergence = None if call is None else call.divergence
        self._leaves, self.is_leaving = (call.leaves if call is not None and can_hold else None), False
        self.heartbeats: dict[int, Heartbeat] = {}
        self._first: dict[int, Heartbeat] = {}
        self._steps_per_s = 0.0
        self._snapshot = 0  # number of the newest mid-call snapshot that was collected
        self._liveness = LivenessCheck(self._lifecycle.platform, self._lifecycle.spec.heartbeat_s)
        # The first round of polls comes early in a small group. A large group is busy when it starts or recovers.
        first_s = self._liveness.round_s(self._num_asked, _FIRST_ROUND_S)
        is_soon = of_call and first_s <= _FIRST_ROUND_S
        self._next_round = now + (first_s if is_soon else self._liveness.round_s(self._num_asked))
        self._next_nodes, self._next_growth = now + NODES_S, now
        self._margin, self._is_holding = _MIN_MARGIN, False
        # This reason applies if the ranks stop although this monitor has not asked them to.
        self.reason = "the trainer's process, which has died, had stopped it for that" if can_hold else ROOM
        self._before: dict[int, Heartbeat] = {}
        self._cut_off_at: float | None = None  # time at which the driver noticed that Ray was stopped
        self._heard_at = now  # time of the last answer of any rank
        if self._lifecycle.group is not None:
            self._lifecycle.group.on_wait = self.poll
        if of_call:
            self._lifecycle.let_step_in()

    def go_on(self) -> None:
        """Continue to watch the group while it recovers or changes after a call.

        Keep the call's heartbeats for reports.
        """
        if self.is_on:
            before = self.heartbeats
            self.watch()
            self._before = before

    def poll(self) -> None:
        """Read the workers' answers. Kill workers that are silent for too long, and collect mid-call snapshots.

        Once per round, also request heartbeats and, if the group must change, make the ranks stop between two steps.
        Once the call should end early, make the ranks stop at an upcoming step. From then on, a round only requests
        heartbeats.

        Call this method regularly while the driver waits for the workers.

        Raises:
            WorkersLostError: Ray was stopped, and no worker has responded for a while.
        """
        if not self.is_on:
            return
        self._listen()
        is_cut_off = self._lifecycle.is_ending and self._is_cut_off()
        is_left = self._leaves is not None and self._leaves()
        # A proposal waits for answers. If Ray was stopped, propose only once a worker has responded since then.
        if is_left and (self._cut_off_at is None or self._heard_at > self._cut_off_at):
            self.hold_to_leave()
        now = self._lifecycle.now()
        if now >= self._next_round and not is_cut_off:
            self._next_round = now + self._next_round_s()
            self._ask()
            if not is_left:  # otherwise, Ray may be shutting down, and a request to Ray could then take a minute
                self._begin_round()
        self._liveness.rest()

    def _begin_round(self) -> None:
        """Once per round, look after the standby workers, the size of the group, and the snapshots."""
        if self._lifecycle.group is not None:
            self._lifecycle.group.standby.look_after()
        if self._can_hold:
            self._hold_where_due()
        if self._is_of_call:
            if self._lifecycle.owes_spares:
                self._lifecycle.start_spares()
            self._lifecycle.let_step_in()
        if not self._is_of_restore:
            self._snapshots.poll()  # Ray transfers a snapshot to this node only once it is requested
            self.observe()

    def observe(self) -> None:
        """Call the observer unless it is None or the trainer was stopped."""
        if self.observer is not None and not self._lifecycle.stopped.is_set():
            self.observer()

    def await_snapshot(self) -> None:
        """Wait until the snapshot in transit has arrived or is lost."""
        if not self.is_on:
            self.watch()
        self._snapshots.poll()
        while self._snapshots.is_coming:
            self._snapshots.poll(timeout_s=_POLL_S)
            self.poll()

    # -------------------------------------------------------------------------------------------- heartbeats

    @property
    def _num_asked(self) -> int:
        return len(self._lifecycle.group) if self._lifecycle.group is not None else 0

    def _next_round_s(self) -> float:
        group = self._lifecycle.group
        is_awaited = self._can_hold and group is not None and group.standby.num_coming > 0
        is_fast = is_awaited or self._lifecycle.spec.snapshots_inside
        return self._liveness.round_s(self._num_asked, *((_FASTEST_ROUND_S,) if is_fast else ()))

    def _ask(self) -> None:
        group = self._lifecycle.group
        if group is None:
            return
        asked = (rank for rank in group.remote_ranks if rank not in group.gone)
        self._liveness.ask(map(group.remote, asked), WorkerProcess.beside, interface.heartbeat)
        in_driver = None if group.local_replica is None else interface.heartbeat(group.local_replica)
        if in_driver is not None:
            self._note(0, in_driver)

    def _listen(self) -> None:
        group = self._lifecycle.group
        ranks: dict[Any, int] = {} if group is None else {worker: rank for rank, worker in enumerate(group.workers)}
        answers, silent = self._liveness.poll()
        for worker, outcome in answers.items():
            if outcome.ok:
                self._heard_at = self._lifecycle.now()
            if isinstance(outcome, Answered) and outcome.value is not None and worker in ranks:
                self._note(ranks[worker], outcome.value)
        if silent_s := {ranks[worker]: seconds for worker, seconds in silent.items() if worker in ranks}:
            self._kill_hung(silent_s)
        if answers and not self._is_of_restore:
            self._look_for_snapshot()
            self._free_parted()

    def _is_cut_off(self) -> bool:
        """Return True if Ray was stopped and no rank runs in the driver. If no worker responds either, end the call.

        Called after a signal that ends the program. If all processes of the program got the signal, Ray was stopped,
        too. Ray then no longer reports lost workers. After a minute without the head node, Ray kills the driver. The
        driver must save the newest snapshot before that.

        Raises:
            WorkersLostError: No worker has responded for a while.
        """
        lifecycle, group, now = self._lifecycle, self._lifecycle.group, self._lifecycle.now()
        if group is None or not group.is_cut_off:
            return False
        if self._cut_off_at is None:
            self._cut_off_at = now
        self._ask()
        silent_s = now - max(self._cut_off_at, self._heard_at)
        if silent_s > quiet_s(lifecycle.spec.heartbeat_s):
            lifecycle.gives_state_up = True  # no worker would answer a request for its state, either
            raise WorkersLostError(f"Ray was stopped, and no worker has responded for {silent_s:.0f} s.")
        return True

    def _free_parted(self) -> None:
        """Interrupt the ranks if they ran different steps, because they would wait for each other forever.

        The call then fails, and its error describes how the ranks differ.
        """
        group = self._lifecycle.group
        if group is not None and self._divergence is not None and self._divergence(self.heartbeats):
            self._divergence = None
            group.interrupt()

    def _note(self, rank: int, heartbeat: Heartbeat) -> None:
        self._lifecycle.spec.relay.tell({str(rank): heartbeat.notes})
        before = self.heartbeats.get(rank)
        if before is not None and heartbeat.step > before.step >= 0 and heartbeat.at > before.at:
            self._steps_per_s = (heartbeat.step - before.step) / (heartbeat.at - before.at)
        self.heartbeats[rank] = heartbeat
        if heartbeat.is_training:
            self._first.setdefault(rank, heartbeat)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of all ranks together in the running training call.

        None if this number cannot be calculated yet or is 0. Each rank's share is measured from its first heartbeat in
        the call to its last heartbeat so far.
        """
        group = self._lifecycle.group
        spans = [(first, self.heartbeats[rank]) for rank, first in self._first.items()]
        if group is None or len(spans) < len(group) or not all(last.at > first.at for first, last in spans):
            return None
        return sum((last.num_samples - first.num_samples) / (last.at - first.at) for first, last in spans) or None

    def _kill_hung(self, silent: Mapping[int, float]) -> None:
        """Kill ranks that have not responded for too long. Their call then fails, as if the workers had died.

        Args:
            silent: For each of these ranks, its seconds of silence.
        """
        group = self._lifecycle.running
        silent_s = max(silent.values())
        cause = f"{named(silent)} did not respond for {silent_s:.0f} s"
        logger.warning("%s\n%s", cause, self._report())
        if group.is_ended:  # a second Ctrl-C ended the group while the report was collected
            return
        self._lifecycle.history.record(GroupEvent("hung", len(group), len(group), silent_s, cause))
        for rank in silent:
            group.kill_rank(rank)

    def tell_stuck(self) -> None:
        """Log each rank's progress and stack, so that the user can see which rank blocks the others."""
        if self.is_on:
            logger.warning("workers are not stopping:\n%s", self._report())

    def _report(self) -> str:
        """Return a report of each rank's last step and current stack.

        Ranks with the same step and stack share an entry.
        """
        group = self._lifecycle.group
        if group is None:
            return "there is no group"
        asked = {rank: each for rank, each in ask_heartbeats(group, _REPORT_S).items() if each.step >= 0}
        heartbeats = {**self.heartbeats, **self._before, **asked}
        stacks: Mapping[int, str] = group.ask_workers(WorkerProcess.stack, timeout_s=_REPORT_S)
        alike: dict[str, list[int]] = {}
        for rank in range(len(group)):
            alike.setdefault(f"{_place(heartbeats.get(rank))}\n{stacks.get(rank, '  no answer')}", []).append(rank)
        return shown_together(alike)

    def _look_for_snapshot(self) -> None:
        """Collect the newest snapshot that all ranks took during the call.

        Do nothing while another snapshot is in transit.
        """
        group = self._lifecycle.group
        if group is None or len(self.heartbeats) < len(group):
            return
        newest = min(heartbeat.snapshot for heartbeat in self.heartbeats.values())
        if newest <= self._snapshot:
            return
        parts = group.ask_beside(method_of(RegroupingReplica.part_of_snapshot), newest)
        if None in parts.values() and self._once.is_first("snapshots too fast"):
            logger.warning(
                "snapshots inside the call are taken too often to collect each one, so a restart may lose more steps. "
                "Use a larger `snapshot_every_n_steps`, so that snapshots are a second or more apart"
            )
        captures = [part for rank in range(len(group)) if (part := parts.get(rank)) is not None]
        if len(captures) < len(group):
            return
        self._snapshots.poll()
        if not self._snapshots.is_coming:
            self._snapshots.take_captures(captures, group)
            self._snapshot = newest

    # ------------------------------------------------------------------------------------ stops inside a call

    def _hold_where_due(self) -> None:
        """Stop the running call between two steps if workers must leave the group or can join the group."""
        lifecycle, group, now = self._lifecycle, self._lifecycle.group, self._lifecycle.now()
        if group is None or self._is_holding:
            return
        if now >= self._next_nodes:
            self._next_nodes = now + NODES_S
            if lifecycle.leaving_nodes_in_use():
                self._agree(group, LEAVING)
                return
        check_s = lifecycle.resizing.check_s
        if check_s is None or len(group) >= lifecycle.scaling.max_workers:
            return
        is_due = now >= self._next_growth
        if is_due:
            self._next_growth = now + check_s
        if not lifecycle.spec.regroups:  # replicas that cannot regroup can only be restarted as a larger group
            if is_due and lifecycle.find_room():
                self._agree(group, ROOM)
            return
        if is_due:
            lifecycle.start_standby()
        are_enough = len(group) + group.standby.num_ready >= lifecycle.scaling.max_workers
        if are_enough or not group.standby.num_coming:
            group.standby.kill_unresponsive()
            if group.standby.num_ready:
                self._agree(group, ROOM)

    def hold_to_leave(self) -> None:
        """If the call should end early, propose an upcoming step at which all ranks stop.

        If the driver is the only worker, the call itself runs this method between two steps.
        """
        group = self._lifecycle.group
        if self._leaves is None or group is None or self._is_holding or not self._leaves():
            return
        self._agree(group, LEFT)
        self.is_leaving = self._is_holding
        has_stepped = any(each.step > 0 for each in self.heartbeats.values())
        if not self.is_leaving and not has_stepped:  # the ranks have not completed a step yet
            self._margin = _MIN_MARGIN

    def _agree(self, group: WorkerGroup, reason: str) -> None:
        """Propose a step after which all ranks stop. If a rank is past that step, the next proposal names a later step.

        Args:
            group: The worker group.
            reason: Why the ranks are asked to stop.
        """
        self.reason = reason
        margin = max(self._margin, math.ceil(self._steps_per_s * _HOLD_AHEAD_S))
        if len(group) == 1 and self._margin == _MIN_MARGIN:
            margin = 1  # there is no other rank to agree with, so stop after the current step
        self._num_holds += 1
        number = self._num_holds
        answers = group.ask_beside(method_of(RegroupingReplica.propose_hold), number, margin, None, ranks=[0])
        at = answers.get(0)
        if at is not None:
            others = range(1, len(group))
            answers |= group.ask_beside(method_of(RegroupingReplica.propose_hold), number, margin, at, ranks=others)
        is_refused = any(answer is None or answer != at for answer in answers.values())
        is_agreed = len(answers) == len(group) and not is_refused
        resolved = group.ask_beside(method_of(RegroupingReplica.resolve_hold), number, is_agreed)
        if answers or resolved:
            self._heard_at = self._lifecycle.now()
        self._is_holding = is_agreed
        # Use a larger margin only if a rank was past the step. If a rank did not answer, propose the same margin again.
        self._margin = _MIN_MARGIN if is_agreed else self._margin * (2 if is_refused else 1)

    def settle_last_hold(self) -> None:
        """Complete a proposal to stop that the trainer's previous process may have left open when it died.

        The ranks would otherwise wait for the decision forever. If that process has already confirmed the proposal to
        one rank, all ranks must stop. Otherwise the proposal is canceled.
        """
        group = self._lifecycle.running
        holds = filter(None, group.ask_beside(interface.last_hold).values())
        self._num_holds, is_agreed = max(holds, default=(0, False))
        if self._num_holds:
            group.ask_beside(method_of(RegroupingReplica.resolve_hold), self._num_holds, is_agreed)


def _place(heartbeat: Heartbeat | None) -> str:
    if heartbeat is None:
        return "no answer yet"
    return f"epoch {heartbeat.epoch}, step {heartbeat.step}, {heartbeat.phase}"


def shown_together(alike: Mapping[str, Sequence[int]]) -> str:
    """Return a report of what the ranks are doing.

    The report shows the rarest activities, because most ranks just wait for others.

    Args:
        alike: For each activity (a step and a stack, as text), the ranks that are doing it.
    """
    few = sorted(alike.items(), key=lambda item: len(item[1]))[:_MOST_STACKS]
    lines = [f"{named(ranks)}: {text}" for text, ranks in sorted(few, key=lambda item: item[1][0])]
    num_others = sum(map(len, alike.values())) - sum(len(ranks) for _, ranks in few)
    return "\n".join([*lines, f"{num_others} other ranks are elsewhere"] if num_others else lines)


def ask_heartbeats(group: WorkerGroup, timeout_s: float) -> dict[int, Heartbeat]:
    """Request a heartbeat from each rank. Return the heartbeats that arrive within `timeout_s`, by rank."""
    answers = group.ask_beside(interface.sign_of_life, timeout_s=timeout_s)
    return {rank: heartbeat for rank, heartbeat in answers.items() if heartbeat is not None}
