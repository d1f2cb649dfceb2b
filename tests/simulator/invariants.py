"""What must hold, whatever happens. The first thing that does not ends the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raysgd.core.engine.group import GroupHooks
from raysgd.core.engine.policies import Diagnosis, RetryBudget, classify
from raysgd.core.engine.recovery.machine import Capturing
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.engine.shared.types import GroupReport, StateHandover
from tests.simulator.platform import SimReservation
from tests.simulator.processes import Process
from tests.simulator.replica import Given, SimReplica, State, used_until
from tests.simulator.schedule import LOSSES

if TYPE_CHECKING:
    from tests.simulator.running import Simulation


MOST_REPLAY_S = 30.0
_NOTICED_S = 2.5  # longer than the driver goes without a look at the nodes
_BATCH_S = 0.5  # longer than one takes
_MOMENT_S = 0.1  # longer than an answer is on its way


class Hooks(GroupHooks):
    """Counts the rebuilds that a call is charged for."""

    def __init__(self) -> None:
        self.num_failures = 0

    def on_failure(self, diagnosis: Diagnosis) -> None:
        self.num_failures += 1


class WatchedBudget(RetryBudget):
    """A budget whose payments are checked against what the documentation promises."""

    def __init__(self, num_retries: float, invariants: Invariants) -> None:
        super().__init__(num_retries)
        self._invariants = invariants
        self.num_restored = 0
        self._last_rejoin: int | None = None

    def pay_for_continuing(self, progress: int) -> None:
        before, hung = self.num_spent, bool(self._invariants.has_hung)
        super().pay_for_continuing(progress)
        last, self._last_rejoin = self._last_rejoin, progress
        due = int(not progress or hung or (last is not None and progress - last < 2))
        self._invariants.require(
            self.num_spent - before == due, f"a rejoin after {progress} steps cost {self.num_spent - before}"
        )
        self._invariants.check_paid(progress)

    def pay_for_restart(self) -> None:
        before = self.num_spent
        super().pay_for_restart()
        self._last_rejoin = None
        self.num_restored += 1
        self._invariants.require(self.num_spent == before + 1, "a restart was free")
        self._invariants.require(self.num_spent <= self.num_retries, "more retries were spent than there are")


class Invariants:
    """Checks after every event, after every call, and at the end.

    Attributes:
        has_hung: Whether the ranks that are lost are so because one hung, though no one died; None between losses.
        may_only_copy: Whether a group may form that is too small to train, to copy its state.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.hooks = Hooks()
        self._formed_progress: dict[str, int] = {}
        self._progress: dict[str, tuple[int, bool]] = {}
        self._reasons_before: tuple[int, ...] | None = None
        self.has_hung: bool | None = None
        self.may_only_copy = False

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.fail(otherwise)

    def fail(self, why: str) -> None:
        """An invariant is broken."""
        self._simulation.tell(f"BROKEN {why}")
        self._simulation.kernel.stop(why)

    # ------------------------------------------------------------------------------------ after every event

    def check_step(self, given: Mapping[int, Given]) -> None:
        """All ranks step from one state; no sample is given twice."""
        states = {each.state for each in given.values()}
        if len(states) != 1:
            self.fail(f"ranks step from different states: {'; '.join(map(str, states))}")
        self.require(len(given) >= self._simulation.schedule.min_workers, f"{len(given)} ranks take a step")

    def check_state(self, state: State) -> None:
        """A pass has used its samples in order, each once."""
        wanted = used_until(self._simulation.schedule.num_samples, state.epoch, state.consumed)
        if state.used != wanted:
            self.fail(f"the passes have used {_as_bits(state.used)} instead of {_as_bits(wanted)}: {state}")

    def check_replica(self, replica: SimReplica) -> None:
        """The same, and its tensors are those of its state."""
        self.check_state(replica.state)
        self.require(replica.is_undone, "what a batch that broke off has changed is not undone")

    def check_formed(self, replica: SimReplica, handover: StateHandover) -> None:
        """A rank is in its new group: it knows no less than the most advanced of those that are there."""
        if replica.world.rank == handover.source:
            self._formed_progress.pop(replica.name, None)  # it comes last now
            self._formed_progress[replica.name] = replica.replica_progress().position
        if self._simulation.process_of(replica).is_killed:  # it goes on for a while in a group that was given up
            return
        members = self._members_of(replica)
        known = [self._progress[name] for name in members if name in self._progress]
        best = max((steps for steps, is_whole in known if is_whole), default=0)
        self.require(
            replica.state.steps >= best, f"a group goes on from step {replica.state.steps}: one was at {best} already"
        )
        self.require(replica.is_whole, "a group goes on from the middle of a step")
        self.check_size(replica.world.size)
        self.check_replica(replica)

    def check_size(self, num_workers: int) -> None:
        schedule = self._simulation.schedule
        is_enough = (
            num_workers >= schedule.min_workers
            or self._simulation.controller.recovery.is_fetching
            or self.may_only_copy
        )
        self.require(is_enough, f"a group of {num_workers} workers is too small")
        self.require(num_workers <= schedule.num_workers, f"a group of {num_workers} workers is too large")

    def check_given_up(self, report: GroupReport, num_replacements: int) -> None:
        """A start is not given up while workers that died over it may be replaced, and have room and no bug."""
        simulation = self._simulation
        has_room = all(node.is_alive for node in simulation.cluster.nodes.values())
        kinds = simulation.befalling.kinds
        has_bug = classify(report).kind == "user" or kinds["raise"] or kinds["stop"]  # another thread ends the trainer
        left = f"{num_replacements} more workers may be started in the place of dead ones"
        self.require(not (has_room and num_replacements) or bool(has_bug), f"a start is given up, though {left}")

    def check_given_up_state(self, living: Sequence[Process], befallen: Mapping[str, int]) -> None:
        """A state that only workers have is given up only if no healthy worker has it."""
        kinds = self._simulation.befalling.kinds
        is_torn = self._simulation.schedule.has_halves and not self._simulation.schedule.undo
        is_disturbed = dict(kinds) != befallen or is_torn or any(kinds[kind] for kind in ("freeze", "stall", "slow"))
        self.require(is_disturbed or not living, f"a state is given up that {', '.join(map(str, living))} have")

    def check_recalled(self, took_s: float) -> None:
        """A spare that validates steps in after a batch, where nothing holds it up."""
        kinds, most_s = self._simulation.befalling.kinds, _BATCH_S + self._simulation.late_s
        is_held_up = any(kinds[kind] for kind in ("slow", "freeze", "stall", "load long", "lose node"))
        self.require(is_held_up or took_s <= most_s, f"a spare took {took_s:.1f} s to leave its validation")

    def _members_of(self, replica: SimReplica) -> list[str]:
        group = replica.connection.group
        if group is None:
            return [replica.name]
        processes, members = self._simulation.cluster.processes, set(map(id, group.members.values()))
        return [each.replica.name for each in processes if each.replica and id(each.connection) in members]

    def note_left(self, replica: SimReplica) -> None:
        """A rank says how far it is, before another group is formed."""
        self._progress.pop(replica.name, None)  # it comes last now
        self._progress[replica.name] = replica.state.steps, replica.is_whole
        self.require(replica.is_whole or self._simulation.schedule.undo is False, "a batch cannot be undone")

    def note_settled(self, has_hung: bool) -> None:
        """It is known who survives. What is lost later, while the next group forms, is no reason for it."""
        if self.has_hung is None:
            self.has_hung = has_hung

    def leaving_nodes(self) -> set[str]:
        return {node.name for node in self._simulation.cluster.nodes.values() if node.is_leaving}

    def check_landed(self, process: Process, token: int | None, newest: int) -> None:
        """A process hears only of copies that it has made."""
        self.require(token is None or token <= newest, f"{process} has made {newest} copies; number {token} has landed")

    def check_spent(self, num_spent: int) -> None:
        """No retry is spent without something that may have cost one."""
        most = self._simulation.befalling.num_incidents
        self.require(num_spent <= most, f"{num_spent} retries were spent, but {most} things happened")

    def check_paid(self, progress: int) -> None:
        members = {str(process.pid) for process in self._simulation.controller.group.processes}
        formed = [steps for name, steps in self._formed_progress.items() if name in members][-1]
        self.require(progress == formed, f"paid for {progress} steps, not for {formed}")

    def check_new_process(self, process: Process, reservation: SimReservation, index: int) -> None:
        """A slot has one worker at a time."""
        before = reservation.used_by.get(index)
        is_free = before is None or before.is_dead or before.is_killed
        self.require(is_free, f"{process} got a slot that {before} still uses")

    def check_given_back(self, reservation: SimReservation) -> None:
        """Room is given back after its workers were ended: Ray ends them with it only where the room is our own."""
        left = [each for each in reservation.used_by.values() if not each.is_dead and not each.is_killed]
        self.require(not left, f"room is given back in which there is {', '.join(map(str, left))}")

    def check_ended(self, process: Process) -> None:
        """The driver ends a process by force: not one that loads, and will be ready some day."""
        loads = process.loads and not process.is_endless and not process.is_dead
        self.require(not loads, f"{process} was ended while it loaded")

    # ------------------------------------------------------------------------------------ after every call, at the end

    def check_covered(self, must_follow: bool) -> None:
        """After a call in peace: what no snapshot covers is no more than was asked for."""
        schedule, snapshots = self._simulation.schedule, self._simulation.controller.snapshots
        every_s, has_others = schedule.snapshot_every_s, schedule.snapshot_every or schedule.resize_interval_s
        if every_s is None or has_others or snapshots.is_coming:  # one that is on its way puts off the next
            return
        num_uncovered, replay_s = len(snapshots.uncovered_s), sum(snapshots.uncovered_s)
        if must_follow or every_s == 0.0:
            self.require(not num_uncovered, f"{num_uncovered} calls are not covered by a snapshot")
        if every_s == "auto":
            self.require(replay_s <= MOST_REPLAY_S, f"{replay_s:.0f} s would have to be repeated")

    def waiting(self) -> list[Process]:
        """Workers in good health that are ready to step in, and have been for a moment."""
        simulation, leaving = self._simulation, self.leaving_nodes()
        group = None if simulation.controller.stopped.is_set() else simulation.controller.group
        members = [] if group is None else group.processes
        idle = [each for each in simulation.cluster.live if each not in members and not each.is_killed]
        healthy = [each for each in idle if not each.is_frozen and each.node not in leaving]
        return [each for each in healthy if each.ready_at < simulation.kernel.now - _MOMENT_S]

    def check_grown(self, waiting: Sequence[Process]) -> None:
        """After a call in which nothing befell a group that was too small: those that waited before it stepped in."""
        still = [str(each) for each in self.waiting() if each in waiting]
        num_workers = self._simulation.controller.num_workers
        is_full = num_workers == self._simulation.schedule.num_workers
        self.require(is_full or not still, f"{num_workers} workers go on without {', '.join(still)}")

    def nodes_to_leave(self) -> set[str]:
        """Nodes that have been going away, and could be left, for so long that the next call notices."""
        cluster, before = self._simulation.cluster, self._simulation.kernel.now - _NOTICED_S
        changed_at = self._simulation.controller.history.last_resize
        if not self._nodes_in_use() - self.leaving_nodes() or (changed_at is not None and changed_at > before):
            return set()
        leaving = {node.name for node in cluster.nodes.values() if node.is_leaving and node.leaving_since < before}
        return leaving - {cluster.node_of_driver} if self._simulation.schedule.use_local else leaving

    def check_left(self, leaving: set[str]) -> None:
        """After a call in which nothing befell it: the group has left nodes that were going away, or all were."""
        used = self._nodes_in_use()
        has_others = used - self.leaving_nodes()
        self.require(not has_others or not used & leaving, f"workers are still on {used & leaving}, which will be lost")

    def _nodes_in_use(self) -> set[str]:
        controller = self._simulation.controller
        group = None if controller.stopped.is_set() else controller.group
        return set() if group is None else {process.node for process in group.processes}

    @property
    def reasons(self) -> tuple[int, ...]:
        """How much there was so far for which workers may be lost."""
        befalling = self._simulation.befalling
        return befalling.num_incidents, *(befalling.kinds[kind] for kind in (*LOSSES, "slow", "poisoned", "load long"))

    def check_reasons(self, before: tuple[int, ...], events: Sequence[GroupEvent], is_training: bool) -> None:
        """Workers are lost for a reason: something befell them since the beginning of the last training call."""
        processes = self._simulation.cluster.processes
        has_frozen = any(each.outlives_kill or (each.is_frozen and not each.is_dead) for each in processes)
        is_quiet = self._reasons_before == self.reasons and not has_frozen
        lost = [str(event) for event in events if event.is_failure or event.kind == "hung"]
        self.require(not is_quiet or not lost, f"without a reason: {lost}")
        if is_training:
            self._reasons_before = before

    def forget_reasons(self) -> None:
        """After a call that raised: who knows what it has left."""
        self._reasons_before = None

    def check_between_calls(self) -> None:
        """Nothing is left over that no one knows of."""
        simulation = self._simulation
        if simulation.controller.stopped.is_set():
            return
        group = simulation.controller.group
        sizes = [event.new_size for event in simulation.controller.history.events if event.kind != "hung"]
        # A group that was formed to copy its state may be smaller than the last event says.
        has_copied = any(isinstance(state, Capturing) for state, _, _ in simulation.transitions.visited)
        is_told = group is None or has_copied or sizes[-1:] == [len(group)]
        self.require(is_told, f"the history ends with {sizes[-1:]} workers, not {len(group or ())}")
        held = sum(len(each.bundles) for each in simulation.cluster.reservations if not each.is_closing)
        wanted = len(group.slots) if group is not None else 0
        self.require(held == wanted, f"{held} slots are reserved between calls, not {wanted}")
        self.require(not simulation.controller.monitor.is_on, "a monitor is left between calls")
        known = [] if group is None else group.known_processes
        left = [process for process in simulation.cluster.live if not process.is_killed and process not in known]
        self.require(not left, f"no one knows of {', '.join(map(str, left))}")

    def check_end(self) -> None:
        """Nothing is left over at all."""
        cluster = self._simulation.cluster
        self.require(not cluster.live, f"left over at the end: {', '.join(map(str, cluster.live))}")
        self.require(not cluster.reservations, "reservations are left over at the end")
        left = [thread.number for thread in self._simulation.kernel.threads[1:] if not thread.is_over]
        self.require(not left, f"threads of the driver are left over: {left}")


def _as_bits(used: Sequence[int]) -> str:
    return ", ".join(f"{samples:b}" for samples in used)
