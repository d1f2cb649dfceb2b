"""The life of the group behind a trainer: started, rebuilt from a snapshot, or changed in place.

Nothing is decided here about calls. Whether a loss is worth a retry, and what is run afterwards, is the controller's
business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from raysgd.engine.failures import Diagnosis, classify
from raysgd.engine.history import EventKind, History
from raysgd.engine.policies import (
    GiveUp,
    Resize,
    RetryBudget,
    ScalingPolicy,
    Wait,
    capacity,
    choose_source,
    takers,
)
from raysgd.engine.replica import Capture, Replica
from raysgd.engine.snapshots import SnapshotKeeper
from raysgd.engine.types import ClusterView, GroupReport, Handover, Standing
from raysgd.engine.watch import Watch
from raysgd.engine.worker import Answer
from raysgd.engine.worker_group import GroupSpec, WorkerGroup
from raysgd.exceptions import ReservationTimeoutError, WorkersLostError, worker_error

if TYPE_CHECKING:
    from raysgd.engine.controller import Call

logger = logging.getLogger(__name__)

START_ATTEMPTS = 4
_SETTLE_S = 1.0  # Ray's view of what is free lags behind by some hundred milliseconds
_REBUILD_RESERVATION_S = 10.0  # what the view calls free is granted at once, or somebody else took it
_REASON_LENGTH = 160
_SUSPICION_S = 60.0
_RECRUIT_S = 30.0  # survivors do not wait longer for somebody new; who is late steps in later


@dataclass(frozen=True)
class Clock:
    """Time as the engine sees it; tests bring their own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class ElasticRules:
    """How a group follows what happens in the cluster.

    Attributes:
        resize_check_s: How often a running call looks for room to grow; None: growing waits for the next call.
        heartbeat_s: A worker that gives no sign of life for so long is lost.
        leaving_nodes: Asks for the nodes that will go away soon.
    """

    resize_check_s: float | None = None
    heartbeat_s: float = 30.0
    leaving_nodes: Callable[[], frozenset[str]] = frozenset


@dataclass(frozen=True)
class _Change:
    """A change of the group in place.

    Attributes:
        kind: What it is called in the history.
        cause: Why.
        staying: Ranks that are to stay.
        began: When it began.
        can_wait: Whether to wait for workers that are still being made ready.
        budget: What pays for it; None for what costs nothing.
        orphans: How far the ranks were that leave in good order.
    """

    kind: EventKind
    cause: str
    staying: Sequence[int]
    began: float
    can_wait: bool
    budget: RetryBudget | None = None
    orphans: tuple[Any, ...] = ()


class Lifecycle:
    """Owns the group.

    Args:
        spec: What a group is started from.
        scaling: Decides the number of workers.
        snapshots: The retry point.
        make_group: Makes a group that is not started yet.
        view: Reads the cluster.
        clock: Time.
        release_timeout_s: How long to wait until Ray has taken the reservation back.
        rules: How the group follows the cluster.
    """

    def __init__(
        self,
        spec: GroupSpec,
        scaling: ScalingPolicy,
        snapshots: SnapshotKeeper[Call],
        make_group: Callable[[GroupSpec, int], WorkerGroup],
        view: Callable[[], ClusterView],
        clock: Clock,
        release_timeout_s: float,
        rules: ElasticRules,
    ) -> None:
        self.spec = spec
        self.scaling = scaling
        self._snapshots = snapshots
        self._make_group = make_group
        self._view = view
        self._clock = clock
        self.release_timeout_s = release_timeout_s
        self.rules = rules
        self.history = History()
        self.group: WorkerGroup | None = None
        self.facts: list[Any] = []
        self._suspected: dict[str, float] = {}

    @property
    def num_workers(self) -> int:
        """How many workers there are now; while there is no group, how many the next one is meant to have."""
        return self.group.num_workers if self.group is not None else self.scaling.max_workers

    @property
    def nodes_to_avoid(self) -> frozenset[str]:
        """Nodes that nobody should be placed on."""
        now = self._clock.monotonic()
        return frozenset(node for node, until in self._suspected.items() if until > now) | self.rules.leaving_nodes()

    def now(self) -> float:
        """Seconds on the clock that all waiting goes by."""
        return self._clock.monotonic()

    def leaving_nodes_in_use(self) -> frozenset[str]:
        """Nodes with our workers that will go away soon, unless nobody would be left."""
        if self.group is None or self.group.is_driver_only:
            return frozenset()
        used = {info.node_id for info in self.group.infos}
        bound = {self.group.infos[0].node_id} if self.spec.use_local else set()  # the driver cannot leave
        leaving = (self.rules.leaving_nodes() & used) - bound
        return leaving if used - leaving else frozenset()

    # ---------------------------------------------------------------------------------------------- start and end

    def start(self, *, as_fits: bool = False) -> None:
        """Starts the full number of workers, for the first time; with `as_fits`, as many as there is room for.

        A worker that dies while starting is tried again a few times; an exception in the user's set-up is raised at
        once.
        """
        if as_fits:
            self.rebuild("a new trainer", "started")
            return
        began = self._clock.monotonic()
        size = self.scaling.max_workers
        for _ in range(START_ATTEMPTS):
            if self._try_start(size, self.spec.num_spares, self.spec.reservation_timeout_s):
                self._record("started", 0, began, "a new trainer")
                return
        raise WorkersLostError(
            f"Worker start-up failed: a worker process died in each of {START_ATTEMPTS} attempts. The log above and "
            "Ray's worker logs name the cause; too little memory is a frequent one."
        )

    def give_up(self, unless_local: bool = False) -> None:
        """Ends the processes; the next call starts new ones from the last snapshot.

        A worker that is the driver itself, alone, waits for nobody: it can be kept as it stands.
        """
        if self.group is None or (unless_local and self.group.is_driver_only):
            return
        group, self.group = self.group, None
        group.kill(self.release_timeout_s)

    def take_parts(self, parts: Sequence[Capture], *, is_first: bool = False) -> None:
        """Takes over what the ranks copied of their state; what rank 0 kept is fetched."""
        group = self.group
        assert group is not None
        self._snapshots.take(parts, lambda token: group.beside(0, _fetch, token), is_first=is_first)

    def take_snapshot(self, report: GroupReport, *, is_first: bool = False) -> None:
        """Takes over the copies of the state that came with the answers."""
        answers: list[Answer] = report.values
        captures = [answer.capture for answer in answers if answer.capture is not None]
        if captures:
            self.take_parts(captures, is_first=is_first)

    def _try_start(self, num_workers: int, num_spares: int, timeout_s: float) -> bool:
        """Starts a group; False when a worker died.

        Raises:
            WorkerError: The user's set-up failed.
            ReservationTimeoutError: The resources were not granted in time.
        """
        group = self._make_group(self.spec, num_workers)
        group.num_spares = num_spares
        report = group.start(timeout_s)
        if not report.ok:
            diagnosis = classify(report)
            if diagnosis.kind == "user":
                raise worker_error(diagnosis.faults)
            logger.warning("starting %s workers failed: %s", num_workers, words(diagnosis))
            return False
        self.group = group
        self.facts = [answer.value for answer in report.values]
        if not self._snapshots.has_any:
            self.take_snapshot(report, is_first=True)
        if num_spares:
            group.call_up(num_spares, num_workers)
        return True

    # ---------------------------------------------------------------------------------------------- rebuilding

    def rebuild(self, cause: str, kind: EventKind = "rebuilt") -> None:
        """Kills what is left, sizes a new group by what is free, starts it, and restores the last snapshot.

        Raises:
            WorkersLostError: Nothing could be had.
            WorkerError: The user's set-up failed.
        """
        began, old_size = self._clock.monotonic(), self.num_workers
        self._snapshots.poll(timeout_s=_SETTLE_S)
        self._snapshots.leave_group()
        self.give_up()
        for attempt in range(self.scaling.num_attempts):
            view = self._settled_view()
            decision = self.scaling.decide(view, self.spec.resources, attempt)
            if isinstance(decision, GiveUp):
                raise self._starved(decision, view)
            if isinstance(decision, Wait):
                logger.warning("%s; nothing is free, waiting %.1f s", cause, decision.delay_s)
                self._clock.sleep(decision.delay_s)
                continue
            num_spares = min(self.spec.num_spares, capacity(view, self.spec.resources) - decision.num_workers)
            if self._try_restart(decision.num_workers, max(0, num_spares)):
                self._record(kind, old_size, began, cause, self._restored_from())
                return
        raise WorkersLostError(f"No group could be started in {self.scaling.num_attempts} attempts after: {cause}.")

    def _settled_view(self) -> ClusterView:
        """The cluster, once its view of what is free has caught up with what we just gave back."""
        deadline = self._clock.monotonic() + _SETTLE_S
        while True:
            view = self._view()
            need = self.spec.resources
            wanted = min(self.scaling.max_workers, capacity(view, need, free_only=False))
            if capacity(view, need) >= wanted or self._clock.monotonic() >= deadline:
                return view
            self._clock.sleep(0.05)

    def _try_restart(self, num_workers: int, num_spares: int) -> bool:
        """Starts a group and restores it; False when a worker died or the resources went to somebody else meanwhile."""
        try:
            return self._try_start(num_workers, num_spares, _REBUILD_RESERVATION_S) and self._restore()
        except ReservationTimeoutError:
            logger.warning("the resources for %s workers were taken by somebody else", num_workers)
            return False
        except BaseException:  # Ctrl-C too: nobody may ever use a group that is restored half-way
            self.give_up()
            raise

    def _restore(self) -> bool:
        """Brings the new group to the state of the last snapshot, and on to the last completed call.

        Returns:
            False when a worker died over it.
        """
        group, snapshot = self.group, self._snapshots.landed
        assert group is not None
        # Calls that are run again take long, too. No snapshots: one taken now would seem to cover all of them.
        watch = Watch(self, can_hold=False, take_inside=lambda parts: False)
        if snapshot is not None:
            state = group.share(snapshot.shared_state)
            function: Callable[..., Any] = _restore
            rest: tuple[Any, ...] = (snapshot.rank_states,)
            if snapshot.progress is not None:
                function, rest = _restore_inside, (snapshot.rank_states, snapshot.progress)
            args: dict[int, Sequence[Any]] = {rank: (state[rank], *rest) for rank in range(len(group))}
            if not self._is_fine(group.on_replica(function, args, tick=watch.tick)):
                return False
        is_inside = self._snapshots.is_inside
        for call in self._snapshots.calls_since:
            logger.info("running a completed call again, because its snapshot was lost with its worker")
            function = call.resume if is_inside and call.resume is not None else call.function
            is_inside = False
            args = call.on_its_ranks(call.args_for(group.worlds))
            if not self._is_fine(group.on_replica(function, args, tick=watch.tick)):
                return False
        return True

    def _restored_from(self) -> str:
        snapshot = self._snapshots.landed
        if snapshot is None or snapshot.progress is None:
            return "from the last completed call"
        return f"from a snapshot inside the call, {snapshot.progress[0]}"

    def _is_fine(self, report: GroupReport) -> bool:
        if report.ok:
            return True
        diagnosis = classify(report)
        self.give_up()
        if diagnosis.kind == "user":
            raise worker_error(diagnosis.faults)
        logger.warning("restoring the state failed: %s", words(diagnosis))
        return False

    def _starved(self, decision: GiveUp, view: ClusterView) -> WorkersLostError:
        from raysgd.engine.resources import explain

        table = explain(self.spec.resources, self.scaling.max_workers, view)
        return WorkersLostError(
            f"No workers can be had: {decision.reason}.\n{table}\nThe last completed state is kept: it can be "
            "saved, and the next call looks for resources again."
        )

    # ---------------------------------------------------------------------------------------------- in place

    def rejoin(
        self,
        report: GroupReport,
        cause: str,
        budget: RetryBudget,
        tick: Callable[[], None],
        tell_stuck: Callable[[], None],
    ) -> bool:
        """After a loss: lets the survivors form a new group, with spares and new workers as far as there are any.

        Args:
            report: The failed call.
            cause: Why it failed.
            budget: What pays for it.
            tick: Called now and then while it waits.
            tell_stuck: Called if a survivor takes long to come to an end with what it does.

        Returns:
            False when that cannot be done or failed; the group is good for nothing then but to be rebuilt.
        """
        began = self._clock.monotonic()
        group = self.group
        assert group is not None
        survivors = group.settle(report, tell_stuck)
        if group.silent:
            cause = f"rank {', '.join(map(str, sorted(group.silent)))} does not answer any more; {cause}"
        self._suspect(group, survivors)
        can_wait = self.rules.resize_check_s is None
        return self._reform(_Change("rejoined", cause, survivors, began, can_wait, budget), tick)

    def change(
        self, leaving: frozenset[str], cause: str, tick: Callable[[], None], parts: Sequence[Capture] = ()
    ) -> bool:
        """Between two steps or calls: lets the workers on the nodes `leaving` go, and those that are ready step in.

        Args:
            leaving: Nodes that are going away.
            cause: Why.
            tick: Called now and then while it waits.
            parts: What each rank copied of its progress when it was held inside a call.
        """
        began = self._clock.monotonic()
        group = self.group
        assert group is not None
        staying = [rank for rank, info in enumerate(group.infos) if info.node_id not in leaving]
        kind: EventKind = "left" if len(staying) < len(group) else "grown"
        orphans = tuple(part.progress for rank, part in enumerate(parts) if rank not in staying)
        return self._reform(_Change(kind, cause, staying, began, can_wait=kind == "left", orphans=orphans), tick)

    def _suspect(self, group: WorkerGroup, survivors: Sequence[int]) -> None:
        """Avoids for a while the nodes of ranks that went silent without a report of their death: perhaps all is gone.

        Ray tells of the death of a process at once, of that of a node half a minute later.
        """
        silent = {group.infos[rank].node_id for rank in group.silent}
        until = self._clock.monotonic() + _SUSPICION_S
        self._suspected |= dict.fromkeys(silent - {group.infos[rank].node_id for rank in survivors}, until)

    def _reform(self, change: _Change, tick: Callable[[], None]) -> bool:
        try:
            return self._try_reform(change, tick)
        except BaseException:  # Ctrl-C too: nobody may ever use a group that is formed half-way
            self.give_up()
            raise

    def _try_reform(self, change: _Change, tick: Callable[[], None]) -> bool:
        group = self.group
        assert group is not None
        old_size = len(group)
        stood = self._stand(change.staying, tick)
        if stood is None:
            return False
        staying, standings, port = stood
        source = choose_source(standings)
        if source is None:
            logger.info("the survivors cannot go on by themselves: %s", _obstacle(standings))
            return False
        progress = standings[source].progress
        if change.budget is not None and not change.budget.covers_rejoin(progress):
            return False
        group.let_go([rank for rank in range(old_size) if rank not in staying])
        joining = self._find_joining(len(staying), change.can_wait)
        new_size = len(staying) + len(joining)
        if new_size < self.scaling.min_workers:
            for recruit in joining:
                group.recruits.dismiss(recruit)
            return False
        handover = Handover(source, (*takers(standings, source), *range(len(staying), new_size)), change.orphans)
        report = group.regroup(staying, joining, port, handover, tick)
        if not report.ok:
            logger.warning("forming a new group failed: %s", words(classify(report)))
            return False
        if staying[0] != 0:
            self._snapshots.leave_group()
        self.facts = list(report.values)
        if change.budget is not None:
            change.budget.pay_for_rejoin(progress)
        self._record(change.kind, old_size, change.began, change.cause, standings[source].words)
        self.call_up_spares()
        return True

    def _stand(
        self, survivors: Sequence[int], tick: Callable[[], None]
    ) -> tuple[list[int], list[Standing], int] | None:
        """Lets the survivors leave the group; those that turn out to be dead are no survivors. None if none is left."""
        group = self.group
        assert group is not None
        ranks = list(survivors)
        while ranks:
            report = group.stand(ranks, tick)
            if report.ok:
                return ranks, [stood.standing for stood in report.values], report.values[0].port
            failed = [o for o in report.outcomes if not o.ok]
            if any(o.failure is not None and o.failure.kind == "user" for o in failed):
                logger.warning("a survivor could not say how far it is: %s", words(classify(report)))
                return None
            ranks = [rank for rank in ranks if rank not in {o.rank for o in failed}]
        return None

    def _find_joining(self, num_survivors: int, can_wait: bool) -> list[Any]:
        """Workers to fill the group up: those that are ready; and new ones, if there is room and we can wait."""
        group = self.group
        assert group is not None
        missing = self.scaling.max_workers - num_survivors
        if missing <= 0:
            return []
        group.recruits.avoid(self.nodes_to_avoid)
        coming = group.recruits.num_coming + group.recruits.num_ready
        group.call_up(missing - coming, self.scaling.max_workers, self.nodes_to_avoid)
        found = group.recruits.take(missing, 0.0)
        if can_wait and len(found) < missing:
            found += group.recruits.take(missing - len(found), _RECRUIT_S)
        return found

    def call_up_spares(self) -> None:
        """Begins to make as many workers ready as are to wait as spares, and were used up or lost."""
        group = self.group
        if group is None or not self.spec.num_spares:
            return
        missing = self.spec.num_spares - group.recruits.num_coming - group.recruits.num_ready
        if missing > 0:
            group.call_up(missing, len(group), self.nodes_to_avoid)

    # ---------------------------------------------------------------------------------------------- growing

    def find_room(self) -> int:
        """How many workers more a new group could have, with all that this one gives back; 0 when none."""
        group = self.group
        assert group is not None
        if len(group) >= self.scaling.max_workers:
            return 0
        decision = self.scaling.grow(self._view(), self.spec.resources, len(group), group.num_seats)
        return decision.num_workers - len(group) if isinstance(decision, Resize) else 0

    def call_up_growth(self) -> None:
        """Begins to make the workers ready that the group lacks, as far as there is room; does not wait for them."""
        group = self.group
        assert group is not None
        missing = self.scaling.max_workers - len(group) - group.recruits.num_coming - group.recruits.num_ready
        if missing <= 0:
            return
        missing -= group.call_up(missing, self.scaling.max_workers, self.nodes_to_avoid)
        num_free = min(missing, capacity(self._view(), self.spec.resources))
        if num_free <= 0:
            return
        try:
            group.reserve(num_free, _SETTLE_S)
        except ReservationTimeoutError:
            logger.info("room for %s more workers was taken by somebody else", num_free)
            return
        group.call_up(num_free, self.scaling.max_workers, self.nodes_to_avoid)

    def can_change_in_place(self, tick: Callable[[], None]) -> bool:
        """Between two calls: whether the replicas could go on in another group."""
        group = self.group
        assert group is not None
        report = group.on_replica(_standing, dict.fromkeys(range(len(group)), ()), tick=tick)
        return report.ok and not any(answer.value.obstacle for answer in report.values)

    def grow_in_place(self, tick: Callable[[], None]) -> None:
        """Between two calls: lets as many workers step in as there is room for."""
        group = self.group
        assert group is not None
        self.call_up_growth()
        deadline = self._clock.monotonic() + _RECRUIT_S
        while group.recruits.num_coming and self._clock.monotonic() < deadline:
            self._clock.sleep(0.005)
            tick()
        if group.recruits.num_ready and not self.change(frozenset(), "there is room for more workers", tick):
            self.rebuild("growing in place failed", "grown")

    def _record(self, kind: EventKind, old_size: int, began: float, cause: str, detail: str = "") -> None:
        now = self._clock.monotonic()
        if kind != "started":
            self.history.last_resize = now
        self.history.record(kind, old_size, self.num_workers, now - began, cause, detail)


def words(diagnosis: Diagnosis) -> str:
    """The cause in a few words, for logs and messages."""
    ranks = ", ".join(map(str, diagnosis.ranks))
    reason = shorten(diagnosis.faults[0].message.partition("\n")[0], _REASON_LENGTH, placeholder=" ...")
    what = "lost rank" if diagnosis.kind == "died" else "lost the connection between ranks, says rank"
    return f"{what} {ranks} ({diagnosis.faults[0].type_name}: {reason})"


def _obstacle(standings: Sequence[Standing]) -> str:
    obstacles = [standing.obstacle for standing in standings if standing.obstacle]
    return obstacles[0] if obstacles else "each was in the middle of a step that had begun to change its state"


def _fetch(replica: Replica, token: int) -> Any:
    return replica.fetch(token)


def _restore(replica: Replica, shared_state: Any, rank_states: Sequence[Any]) -> None:
    replica.restore(shared_state, rank_states)


def _restore_inside(replica: Any, shared_state: Any, rank_states: Sequence[Any], progress: Sequence[Any]) -> None:
    replica.restore_inside(shared_state, rank_states, progress)


def _standing(replica: Any) -> Standing:
    standing: Standing = replica.standing()
    return standing
