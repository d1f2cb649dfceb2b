"""Faults of the engine, each put in on purpose. The simulator has to find every one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raysgd.core.engine import snapshots
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.gathering import Listener, LivenessCheck
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.lifecycle import Lifecycle
from raysgd.core.engine.monitor import Monitor
from raysgd.core.engine.placement import Slots
from raysgd.core.engine.policies import RetryBudget, ScalingPolicy
from raysgd.core.engine.recovery import interpreter, machine
from raysgd.core.engine.recovery.interpreter import Interpreter
from raysgd.core.engine.recovery.machine import Do, Done, End, Finished, Known, Lost, Raise, Running, Transition
from raysgd.core.engine.shared.interface import Call
from raysgd.core.engine.shared.types import GroupReport, Outcome, Rendezvous, ReplicaProgress
from raysgd.core.engine.snapshots import SnapshotPace, Snapshots
from raysgd.core.engine.standby import Loan, StandbyWorkers, StartupCheck
from raysgd.torch.hosting.torch_step import TorchParts
from raysgd.torch.parallel.copies import TensorCopies
from raysgd.torch.parallel.undo import Undo
from raysgd.trainer.worker import training_call
from raysgd.trainer.worker.rank_rows import RankRows
from tests.helpers.facts import with_facts
from tests.simulator.program import Program
from tests.simulator.replica import Run, SimReplica
from tests.simulator.schedule import Fault, Op, Schedule


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        words: What is wrong.
        owner: Where.
        name: The name there that is replaced.
        make: Makes what takes its place, from what is there.
        seeds: Seeds that are tried first.
        schedules: Schedules that are tried before any seed.
    """

    words: str
    owner: Any
    name: str
    make: Callable[[Any], Any]
    seeds: tuple[int, ...] = ()
    schedules: tuple[Schedule, ...] = ()

    @cached_property
    def replacement(self) -> Any:
        """What takes the place of what is there."""
        is_class = isinstance(self.owner, type)
        return self.make(vars(self.owner)[self.name] if is_class else getattr(self.owner, self.name))


def nothing(real: Any) -> Any:
    return lambda *args, **kwargs: None


def always(value: Any) -> Callable[[Any], Any]:
    return lambda real: lambda *args, **kwargs: value


def always_is(value: Any) -> Callable[[Any], Any]:
    return lambda real: property(lambda self: value)


def _pay_for_any_rejoin(real: Any) -> Any:
    def pay(self: RetryBudget, progress: int) -> None:
        real(self, progress)
        self.num_spent += bool(progress)

    return pay


def _pay_for_no_rejoin(real: Any) -> Any:
    def pay(self: RetryBudget, progress: int) -> None:
        self._continued_at = progress

    return pay


def _source(key: Callable[[ReplicaProgress], Any]) -> Callable[[Any], Any]:
    def make(real: Any) -> Any:
        def choose(reports: Sequence[ReplicaProgress]) -> int | None:
            return min(range(len(reports)), key=lambda index: (key(reports[index]), index), default=None)

        return choose

    return make


def _last_source(real: Any) -> Any:
    return lambda reports: len(reports) - 1 if real(reports) is not None else None


def _classify_as_user(real: Any) -> Any:
    def classify(report: GroupReport) -> Any:
        found = real(report)
        return replace(found, kind="user") if found.kind == "disconnected" else found

    return classify


def _sees(**known: Any) -> Callable[[Any], Any]:
    """The table is told other facts."""
    return lambda real: lambda self: with_facts(real(self), **known)


def _tells(**fields: Any) -> Callable[[Any], Any]:
    """The table is told another event."""
    return lambda real: lambda self, *args: replace(real(self, *args), **fields)


def _loses_user_errors(real: Any) -> Any:
    def failed(self: Interpreter, report: GroupReport) -> Any:
        found = real(self, report)
        return replace(found, kind="died") if found.kind == "user" else found

    return failed


def _decide_without_minimum(real: Any) -> Any:
    def decide(self: ScalingPolicy, view: Any, need: Any, attempt: int) -> Any:
        return real(replace(self, min_workers=1), view, need, attempt)

    return decide


def _one_too_many(real: Any) -> Any:
    def decide(self: ScalingPolicy, view: Any, need: Any, attempt: int) -> Any:
        return real(replace(self, max_workers=self.max_workers + 1), view, need, attempt)

    return decide


def _take_usable_twice(real: Any) -> Any:
    def take_usable(self: Slots, count: int, avoid: Any = ()) -> Any:
        taken = real(self, count, avoid)
        self._free += taken
        return taken

    return take_usable


def _give_back_twice(real: Any) -> Any:
    def give_back(self: Slots, slot: Any) -> None:
        real(self, slot)
        real(self, slot)

    return give_back


def _land(version_of: Callable[[Snapshots], int]) -> Callable[[Any], Any]:
    def make(real: Any) -> Any:
        def land(self: Snapshots, snapshot: Any, token: int | None) -> None:
            real(self, replace(snapshot, version=version_of(self)), token)

        return land

    return make


def _take_reversed(real: Any) -> Any:
    def take(self: Snapshots, captures: Sequence[Any], fetch: Any, *, is_first: bool = False) -> None:
        own = [capture.rank_state for capture in captures][::-1]
        mixed = [replace(capture, rank_state=state) for capture, state in zip(captures, own, strict=True)]
        real(self, mixed, fetch, is_first=is_first)

    return take


def _as_first(real: Any) -> Any:
    def take(self: Snapshots, captures: Sequence[Any], fetch: Any, *, is_first: bool = False) -> None:
        real(self, captures, fetch, is_first=True)

    return take


def _shifted(real: Any) -> Any:
    return lambda rank_states, num_ranks: real([*rank_states[1:], *rank_states[:1]], num_ranks)


def _none_is_silent(real: Any) -> Any:
    def poll(self: LivenessCheck) -> Any:
        return real(self)[0], {}

    return poll


def _stops_beside(real: Any) -> Any:
    def stop(self: Listener) -> None:
        self._is_stopped.set()

    return stop


def _kill_politely(real: Any) -> Any:
    def kill_rank(self: WorkerGroup, rank: int) -> None:
        self.workers[rank].kill()

    return kill_rank


def _forget_the_dead(real: Any) -> Any:
    def lost(self: Interpreter, change: Any, staying: Sequence[int], report: GroupReport) -> Lost:
        return Lost(self._lifecycle.running.of_ranks(staying))

    return lost


def _in_other_order(real: Any) -> Any:
    def regroup(self: WorkerGroup, survivors: Sequence[int], *args: Any) -> GroupReport:
        return real(self, list(survivors)[::-1], *args)

    return regroup


def _first_answer_for_all(real: Any) -> Any:
    def listen(self: Listener, on_wait: Any = None) -> dict[int, Outcome]:
        found = real(self, on_wait)
        good = [outcome for outcome in found.values() if outcome.ok]
        return {rank: each if each.ok or not good else replace(good[0], rank=rank) for rank, each in found.items()}

    return listen


def _takes_no_newcomers(real: Any) -> Any:
    def regroup(self: WorkerGroup, survivors: Any, joining: Any, handover: Any, *args: Any) -> GroupReport:
        old = tuple(rank for rank in handover.takers if rank < len(survivors))
        return real(self, survivors, joining, replace(handover, takers=old), *args)

    return regroup


def _forgets_what_was_told(real: Any) -> Any:
    return lambda self, num_steps, rows, present: real(self, num_steps, rows, rows)


def _counts_those_who_are_there(real: Any) -> Any:
    return lambda self, num_steps, rows, present: real(self, num_steps, rows, ())


def _as_of(num_steps_more: int) -> Callable[[Any], Any]:
    return lambda real: lambda self, num_steps: real(self, num_steps + num_steps_more)


def _kills_only_handles(real: Any) -> Any:
    def kill(self: WorkerGroup, timeout_s: float = 5.0) -> None:
        self.standby.kill_all()
        for worker in self.workers:
            worker.kill()

    return kill


def _one_secret(real: Any) -> Any:
    def init(self: Rendezvous, addresses: Any, on_one_node: bool, secret: bytes = b"one") -> None:
        real(self, addresses, on_one_node, b"one")

    return init


def _as_if_repeatable(real: Any) -> Any:
    def is_due_after(self: Snapshots, call: Call) -> bool:
        due: bool = real(self, replace(call, is_repeatable=True))
        return due

    return is_due_after


def _leaves_the_driver(real: Any) -> Any:
    def leaving_nodes_in_use(self: Lifecycle) -> frozenset[str]:
        if self.group is None or self.group.is_driver_only:
            return frozenset()
        used = {info.node_id for info in self.group.infos}
        leaving = self.rules.leaving_nodes() & used
        return leaving if used - leaving else frozenset()

    return leaving_nodes_in_use


_POISONED = Schedule(
    1, num_workers=3, nodes=(4,), ops=(Op("train"),), faults=(Fault("poison", "step", 2), Fault("die", "step", 4))
)

_STUCK_AND_FROZEN = tuple(
    Schedule(
        seed,
        num_workers=num_workers,
        nodes=(7,),
        num_samples=23,
        batch_size=6,
        snapshot_every=snapshot_every,
        heartbeat_s=heartbeat_s,
        ops=(Op("train", 26, 6), Op("train", 50, 6)),
        faults=(Fault(*dies), Fault(*is_late), Fault("freeze", "wait", *freezes)),
    )
    for seed, num_workers, snapshot_every, heartbeat_s, dies, is_late, freezes in (
        (42, 4, None, 5.0, ("die", "step", 2, 4), ("stall", "step", 2, 3), (19, 1)),
        (48, 4, 1, 5.0, ("freeze", "step", 1, 5), ("slow", "step", 2, 5), (96, 2)),
        (14, 3, 1, 20.0, ("die", "merge", 2, 1), ("slow", "regroup", 10, 5), (20, 6)),
    )
)
_PARTED = Schedule(1, ops=(Op("note", 1), Op("look")), faults=(Fault("raise", "note", 1),))
_BUG = Schedule(1, nodes=(4,), ops=(Op("train"),), faults=(Fault("raise", "step", 5),))
_SHRUNK = Schedule(1, min_workers=2, nodes=(1, 1), ops=(Op("train"),), faults=(Fault("lose node", "step", 3),))
_ADVANCED = tuple(
    Schedule(seed, num_workers=3, nodes=(3,), num_samples=40, ops=(Op("train"),), faults=(Fault("die", "merge", 4),))
    for seed in range(20)
)
_INSIDE = tuple(
    Schedule(seed, snapshot_every=1, continues=False, ops=(Op("steps", 8),), faults=(Fault("die", "merge", 6),))
    for seed in range(5)
)
_HANGING = Schedule(
    1, num_workers=3, nodes=(4,), num_samples=40, ops=(Op("train", None, 1),), faults=(Fault("slow", "step", 10),)
)
_DYING_STARTS = Schedule(
    1, num_workers=3, nodes=(3,), ops=(Op("train"),), faults=tuple(Fault("die", "prepare", nth) for nth in (1, 2, 3))
)
_LEFT = Schedule(
    1,
    num_workers=3,
    nodes=(2, 2),
    num_samples=40,
    use_local=True,
    ops=(Op("train"), Op("train")),
    faults=(Fault("drain", "step", 1),),
)
_PLANNED, _SHARED, _LOST_STATE, _TOO_SMALL = (
    Schedule(
        1,
        num_workers=num_workers,
        min_workers=least,
        nodes=nodes,
        num_samples=40,
        batch_size=6,
        is_large=num_workers == 2,
        ops=(Op("leave", argument), Op("train", None, 6)),
        faults=(fault,),
    )
    for num_workers, least, nodes, argument, fault in (
        (3, 1, (4,), 1, Fault("die", "stepped", 4, 1)),
        (3, 1, (6,), 3, Fault("die", "step", 13, 1)),
        (2, 1, (6,), 1, Fault("die", "send", 2)),
        (3, 3, (2, 1), 4, Fault("lose node", "step", 4)),
    )
)
_LONG = Schedule(1, num_samples=100, batch_size=2, ops=(Op("leave", 2),))
_LOOKED_AT = tuple(
    Schedule(
        1,
        num_samples=40,
        heartbeat_s=3.0,
        use_local=True,
        ops=(Op("train"),),
        faults=(Fault("freeze", "step", 3), Fault("interrupt", "wait", nth)),
    )
    for nth in range(50, 66)
)


class _Agreeing:
    """A group whose ranks all seem to agree."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __len__(self) -> int:
        return len(self._group)

    def ask_beside(self, function: Any, *args: Any, ranks: Any = None) -> dict[int, Any]:
        found = self._group.ask_beside(function, *args, ranks=ranks)
        return dict.fromkeys(ranks, args[-1]) if ranks is not None and ranks != [0] else found


def _agrees_with_all(real: Any) -> Any:
    def agree(self: Monitor, group: Any, reason: str) -> None:
        real(self, _Agreeing(group), reason)

    return agree


def _asks_no_more_once_left(real: Any) -> Any:
    def ask(self: Monitor) -> None:
        if self._leaves is None or not self._leaves():
            real(self)

    return ask


def _keeps_no_shares(real: Any) -> Any:
    def go_on_from(self: SimReplica, *args: Any) -> Run:
        run: Run = real(self, *args)
        run.rows.note(run.steps - 1, {})
        return run

    return go_on_from


def _passes_the_plan(real: Any) -> Any:
    def walk_on(self: SimReplica, call: int, num_steps: int | None, hold_at: int | None = None) -> Any:
        is_there = self.run is not None and self.run.steps == hold_at
        return real(self, call, num_steps, None if is_there else hold_at)

    return walk_on


def _takes_any_number(real: Any) -> Any:
    """Each rank gives the newest that it has, whatever was asked for."""
    return lambda replica, number: real(replica, replica.copies.newest or number)


def _keeps_silent(real: Any) -> Any:
    def settle(self: WorkerGroup, *args: Any) -> list[int]:
        return sorted({*real(self, *args), *self.silent})

    return settle


def _keeps_token(real: Any) -> Any:
    def drop(self: Snapshots) -> None:
        token = self.landed_token
        real(self)
        self.landed_token = token

    return drop


def _keeps_incoming(real: Any) -> Any:
    def drop(self: Snapshots) -> None:
        self.landed_token = None

    return drop


def _covers_one_less_inside(real: Any) -> Any:
    def take(self: Snapshots, captures: Sequence[Any], fetch: Any, *, is_first: bool = False) -> None:
        calls = dict(self._calls) if captures[0].progress is not None else {}
        real(self, captures, fetch, is_first=is_first)
        if calls and self._coming is not None:
            taken = replace(self._coming.snapshot, version=max(calls) - 1)
            self._coming = replace(self._coming, snapshot=taken)
        elif calls:
            self._calls[max(calls)] = calls[max(calls)]

    return take


def _infos_reversed(real: Any) -> Any:
    def give_ranks(self: WorkerGroup, workers: Any) -> None:
        for worker, info in zip(workers, [worker.info for worker in workers][::-1], strict=True):
            worker.info = info
        real(self, workers)

    return give_ranks


def _forget_stuck(real: Any) -> Any:
    def let_finish(self: WorkerGroup, *args: Any) -> set[int]:
        lost: set[int] = real(self, *args)
        self.stuck.clear()
        return lost

    return let_finish


def _form_with_the_stateless(real: Any) -> Any:
    def tear_down(self: Interpreter, state: Any) -> Any:
        self._lifecycle.newcomers.clear()
        return real(self, state)

    return tear_down


def _keep_the_small(real: Any) -> Any:
    return lambda plan, known: Transition(Finished(plan), (Do.LEAVE_CALL,))


def _keep_the_interrupted(real: Any) -> Any:
    return lambda state, interrupt, known: Transition(Finished(Raise(End.INTERRUPTED)))


def _begins_late(real: Any) -> Any:
    def walk(self: SimReplica, call: int, num_steps: int | None) -> Any:
        kept = self.run
        if kept is not None:
            kept.call = call
        task = real(self, call, num_steps)
        try:
            reply = next(task)
            self.run = self.run or kept
            while True:
                reply = task.send((yield reply))
        except StopIteration as end:
            return end.value

    return walk


def _any_run(real: Any) -> Any:
    return lambda kept, call: kept


def _begins_again(real: Any) -> Any:
    return lambda self, call, num_steps: self.walk(call, num_steps)


def _from_the_start(real: Any) -> Any:
    return lambda self, state: real(self, Running())


def _without_number(real: Any) -> Any:
    return property(lambda self: real.fget(self)._replace(call=0))


def _kills_no_lent(self: StandbyWorkers) -> None:
    self._drop([*self._coming, *self._ready])


def _recalls_unnoticed(real: Any) -> Any:
    def recall(self: Loan) -> None:
        real(self)
        self.is_recalled = False

    return recall


def _is_run_once(real: Any) -> Any:
    def run(self: ElasticController, loan: Loan | None, function: Any, make_args: Any, on_wait: Any) -> Any:
        found = None if loan is None else loan.run_call(function, make_args, on_wait)
        return None if found is None else found.value

    return run


MUTATIONS = (
    Mutation(
        "a newcomer that got no state is the source", Interpreter, "_tearing_down", _form_with_the_stateless, (1148,)
    ),
    Mutation(
        "a stuck rank that froze is asked to end", WorkerGroup, "_let_finish", _forget_stuck, (), _STUCK_AND_FROZEN
    ),
    Mutation("a restart is not paid for", RetryBudget, "pay_for_restart", nothing, (0,)),
    Mutation("a rejoin without a step is free", RetryBudget, "pay_for_continuing", _pay_for_no_rejoin, (11,)),
    Mutation("a rejoin after some steps is paid for", RetryBudget, "pay_for_continuing", _pay_for_any_rejoin, (18,)),
    Mutation("a rejoin after a hang is free", RetryBudget, "note_hang", nothing, (868,), (_HANGING,)),
    Mutation("retries are never spent", Interpreter, "_known", _sees(num_left=math.inf), (5,)),
    Mutation("retries are always spent", Interpreter, "_known", _sees(num_left=0), (1,)),
    Mutation("a rejoin that led nowhere is tried again", Known, "obstacle_to_continuing", nothing, (), (_POISONED,)),
    Mutation(
        "the least advanced survivor is the source", machine, "choose_source", _source(lambda r: r.position), (38,)
    ),
    Mutation(
        "a survivor in the middle of a step is the source",
        machine,
        "choose_source",
        _source(lambda r: r.can_be_source),
        (38,),
    ),
    Mutation("the last survivor is the source", machine, "choose_source", _last_source, (120,)),
    Mutation("survivors keep their own states", interpreter, "takers", always(()), (38,)),
    Mutation("new workers get no state", WorkerGroup, "regroup", _takes_no_newcomers, (11,)),
    Mutation("survivors come in another order than was agreed", WorkerGroup, "regroup", _in_other_order, (), _ADVANCED),
    Mutation("what lost workers had told is forgotten", RankRows, "keep_lost", _forgets_what_was_told),
    Mutation("what survivors had told counts as lost", RankRows, "keep_lost", _counts_those_who_are_there),
    Mutation("what was told in a step that does not count is counted", RankRows, "as_of", _as_of(1), (125,)),
    Mutation("what was told in the last step that counts is not counted", RankRows, "as_of", _as_of(-1)),
    Mutation("a lost connection counts as an error of user code", interpreter, "classify", _classify_as_user, (5,)),
    Mutation("errors of user code are retried", Interpreter, "_known", _sees(retries_user_errors=True), (568,)),
    Mutation("errors of user code count as losses", Interpreter, "_failed", _loses_user_errors, (), (_BUG,)),
    Mutation("ranks that failed apart are kept", Interpreter, "_known", _sees(keeps_alike=False), (), (_PARTED,)),
    Mutation("too small a group is started", ScalingPolicy, "decide", _decide_without_minimum, (), (_SHRUNK,)),
    Mutation("too large a group is started", ScalingPolicy, "decide", _one_too_many, (0,)),
    Mutation("too small a group goes on", Interpreter, "_known", _sees(min_workers=1), (1,)),
    Mutation("the dead are asked to leave again and again", Interpreter, "_lost_in_tear_down", _forget_the_dead, (1,)),
    Mutation("a slot is given to two workers", Slots, "take_usable", _take_usable_twice, (11,)),
    Mutation("a slot is given back twice", Slots, "give_back", _give_back_twice, (5,)),
    Mutation("a snapshot covers no call", Snapshots, "_land", _land(lambda keeper: 0), (31,)),
    Mutation("a snapshot covers calls after it", Snapshots, "_land", _land(lambda keeper: keeper._version), (6,)),
    Mutation("completed calls are not remembered", Snapshots, "completed", nothing, (6,)),
    Mutation("every snapshot counts as the first", Snapshots, "take_captures", _as_first, (25,)),
    Mutation("ranks get each other's states", Snapshots, "take_captures", _take_reversed, (0,)),
    Mutation("ranks are given the state of the next one", snapshots, "own_states", _shifted, (0,)),
    Mutation("a restored call begins again", Interpreter, "_running", _from_the_start, (), _INSIDE),
    Mutation("a new group is not restored", Interpreter, "_restoring", always(Done()), (0,)),
    Mutation("completed calls are not repeated", Snapshots, "calls_since", always_is(()), (6,)),
    Mutation("a held call counts as finished", interpreter, "HeldAtStep", lambda real: Call, (126,)),
    Mutation("the first answer counts for all", Listener, "listen", _first_answer_for_all, (5,)),
    Mutation("no worker is ever silent", LivenessCheck, "poll", _none_is_silent, (17,)),
    Mutation("frozen workers are not killed by force", WorkerGroup, "kill_rank", _kill_politely, (17,)),
    Mutation("workers that freeze while they start are waited for", StartupCheck, "poll", nothing, (141,)),
    Mutation("the end of a group does not wait for who looks at it", Listener, "stop", _stops_beside, (), _LOOKED_AT),
    Mutation("a group is kept that Ctrl-C left half-way", machine, "_interrupted", _keep_the_interrupted, (311,)),
    Mutation("a stopped group stays", Lifecycle, "stop_group", nothing, (0,)),
    Mutation("reservations are not given back", WorkerGroup, "kill", _kills_only_handles, (0,)),
    Mutation("all groups share a secret", Rendezvous, "__init__", _one_secret, (8,)),
    Mutation("standby workers are never ready", StandbyWorkers, "num_ready", always_is(0), (60,)),
    Mutation("a recovery does not start from what was loaded", Snapshots, "adopt", nothing, (33,)),
    Mutation("copies are never due", SnapshotPace, "is_due", always(False), (41,)),
    Mutation("what cannot be repeated is not copied", Snapshots, "is_due_after", _as_if_repeatable, (308,)),
    Mutation(
        "a state of which there is no copy is lost unnoticed", Interpreter, "_known", _sees(is_lost=False), (132,)
    ),
    Mutation("a hold is agreed on though ranks disagree", Monitor, "_agree", _agrees_with_all, (893,)),
    Mutation(
        "each rank gives its newest snapshot inside a call", SimReplica, "part_of_snapshot", _takes_any_number, (21,)
    ),
    Mutation("silent ranks count as survivors", WorkerGroup, "settle", _keeps_silent, (189,)),
    Mutation("a token is kept though another process is rank 0", Snapshots, "drop_incoming", _keeps_token, (5,)),
    Mutation("a snapshot is awaited of a rank 0 that was lost", Snapshots, "drop_incoming", _keeps_incoming, (156,)),
    Mutation("workers that do not join after all are left over", StandbyWorkers, "kill", nothing, (307,)),
    Mutation("a call that broke off goes on from inside", Snapshots, "leave_call", nothing, (3693,)),
    Mutation("a dead standby worker steps in", StandbyWorkers, "kill_unresponsive", nothing, (1,)),
    Mutation(
        "a snapshot inside a call covers one call less", Snapshots, "take_captures", _covers_one_less_inside, (1356,)
    ),
    Mutation("where survivors live is mixed up", WorkerGroup, "give_ranks", _infos_reversed, (22,)),
    Mutation("nodes that are going away are not left", Lifecycle, "leaving_nodes_in_use", always(frozenset()), (554,)),
    Mutation("a shutdown waits for workers that are still starting", StandbyWorkers, "cancel", nothing, (1191,)),
    Mutation(
        "workers that die while they start are not replaced", StandbyWorkers, "replace", nothing, (), (_DYING_STARTS,)
    ),
    Mutation("a shutdown leaves the workers alone", WorkerGroup, "kill_workers", nothing, (405,)),
    Mutation("a spare is not told to leave its validation", SimReplica, "leave_call", nothing, (1400,)),
    Mutation("a spare that was recalled begins a validation", Loan, "recall", _recalls_unnoticed, (2309,)),
    Mutation("a spare steps in while it validates", Loan, "is_over", always_is(True), (92,)),
    Mutation(
        "spares that validate outlive their group", StandbyWorkers, "kill_all", lambda real: _kills_no_lent, (11,)
    ),
    Mutation(
        "a validation whose spare is gone is not run again", ElasticController, "run_on_spare", _is_run_once, (11,)
    ),
    Mutation("a batch that broke off is not undone", TorchParts, "undo_step", nothing, (92,)),
    Mutation("a batch counts as undone that was not copied", Undo, "can_undo", always(True), (501,)),
    Mutation("weights are not put back", TensorCopies, "restore", nothing, (92,)),
    Mutation("a batch is undone as far as the first one", TorchParts, "commit", nothing, (52,)),
    Mutation("a call that was not begun is answered by the one before", SimReplica, "walk", _begins_late, (157,)),
    Mutation("any call that a rank remembers is the one that goes on", training_call, "run_of", _any_run, (1513,)),
    Mutation("ranks that take a call over do not know which it is", Run, "progress", _without_number, (13,)),
    Mutation("a call that goes on begins again", SimReplica, "walk_on", _begins_again, (13,)),
    Mutation("all calls have one number", Program, "_next_number", always(1), (1513,)),
    Mutation("workers are ended that have the only state", Lifecycle, "holds_only_state", always_is(False)),
    Mutation("a call is not left", Monitor, "hold_to_leave", nothing, (), (_LONG,)),
    Mutation("ranks that froze are not noticed once a call is left", Monitor, "_ask", _asks_no_more_once_left, (1614,)),
    Mutation("a call that was left goes on", Interpreter, "_paused", _tells(must_end=False), (29,)),
    Mutation("a state is not waited for when a call is left", Monitor, "await_snapshot", nothing, (14,)),
    Mutation("a state that was lost counts as there", Snapshots, "shares_current", always_is(True), (), (_LOST_STATE,)),
    Mutation("too small a group trains", machine, "_end_early", _keep_the_small, (), (_TOO_SMALL,)),
    Mutation("a loss hides a planned stop", SimReplica, "walk_on", _passes_the_plan, (), (_PLANNED,)),
    Mutation("what a rank goes on from is lost with it", SimReplica, "_go_on_from", _keeps_no_shares, (), (_SHARED,)),
    Mutation("the driver leaves its node", Lifecycle, "leaving_nodes_in_use", _leaves_the_driver, (), (_LEFT,)),
)
