"""The engine's group as it is, with checks of whom it counts on, who steps in, and who is ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.platform import RemoteWorker
from raysgd.core.engine.shared.types import GroupReport
from raysgd.core.engine.standby import StandbyWorkers
from tests.simulator.processes import Process

if TYPE_CHECKING:
    from tests.simulator.invariants import Invariants

_JUST_S = 5.0  # what is silent is told of first, which takes a while


class WatchedStandby(StandbyWorkers):
    """Checks that who steps in was alive when it was chosen, and did nothing else any more."""

    invariants: Invariants

    @property
    def processes(self) -> list[Process]:
        self.look_after()
        return [_process_of(worker) for worker in (*self._coming, *self._idle)]

    def take_ready(self, count: int, timeout_s: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> Any:
        began, has_lent = self.platform.now(), any(self._idle.values())
        found: list[RemoteWorker] = super().take_ready(count, timeout_s, on_wait)
        if has_lent and not timeout_s:
            self.invariants.check_recalled(self.platform.now() - began)
        for process in map(_process_of, found):
            self.invariants.require(process.died_at >= began, f"{process} was dead already when it was to step in")
            self.invariants.require(not process.is_working, f"{process} is to step in while it validates")
        return found


class WatchedGroup(WorkerGroup):
    """Checks every change of a group."""

    def __init__(self, spec: Any, num_workers: int, platform: Any, *, invariants: Invariants) -> None:
        super().__init__(spec, num_workers, platform)
        self._invariants = invariants
        self.standby = WatchedStandby(self._spec, self.slots, platform)
        self.standby.invariants = invariants

    @property
    def processes(self) -> list[Process]:
        return [worker.process for worker in self.workers]  # type: ignore[union-attr]

    @property
    def known_processes(self) -> list[Process]:
        """Those of its members, of workers that are ready to step in, and of those that are being made ready."""
        return [*self.processes, *self.standby.processes]

    def _make_ready(self, *args: Any) -> GroupReport:
        report = super()._make_ready(*args)
        if not report.ok:
            self._invariants.check_given_up(report, self.standby.replacements.num_left)
        return report

    def settle(self, report: GroupReport | None, *args: Any) -> list[int]:
        unanswered, began = set(self._unanswered), self._platform.now()
        survivors = super().settle(report, *args)
        for rank in unanswered.intersection(survivors):
            process = self.processes[rank]
            is_known = process.is_driver or process.answered_at >= began
            self._invariants.require(is_known, f"{process} has not answered, and counts as a survivor")
        has_died = report is not None and any(found.has_died for found in report.outcomes)
        self._invariants.note_settled(bool(self.stuck) and not has_died)
        return survivors

    def on_replica(self, function: Any, *args: Any, **kwargs: Any) -> GroupReport:
        self._invariants.has_hung = None
        return super().on_replica(function, *args, **kwargs)

    def kill_rank(self, rank: int) -> None:
        process = self.processes[rank]
        is_stuck = rank in self.stuck
        is_silent = process.is_dead or process.is_frozen or process.thawed_at > self._platform.now() - _JUST_S
        self._invariants.require(is_stuck or is_silent, f"{process} was ended by force, though it answers")
        super().kill_rank(rank)


def _process_of(worker: Any) -> Process:
    process: Process = worker.process
    return process
