"""Words for what has befallen a worker group: for the history, for logs, and for the errors with which calls end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.engine.lifecycle import Lifecycle
from raysgd.core.engine.policies import LOOK_AT_RAYS_LOG, Diagnosis, RetryBudget, words
from raysgd.core.engine.recovery.machine import NUM_COPIES, End, Members
from raysgd.core.engine.shared.types import WorkerInfo
from raysgd.core.text.log_lines import named
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import UnevenStepsError, WorkersLostError

LOST_ON_ITS_WAY = (
    f"The state was lost on its way to the driver {NUM_COPIES} times. The log above names the cause; "
    "too little memory in Ray's object store is a frequent one."
)
_WHERE = {End.RAISED_INSIDE: "others were inside the call", End.RAISED_APART: "others were elsewhere"}


@dataclass
class Incident:
    """The reason why a group is changed, replaced or ended.

    Args:
        lifecycle: Holds the worker group.

    Attributes:
        reason: Why, if no call has failed.
        diagnosis: The cause of the failed call, if one has failed.
        divergence: How the steps of the ranks differ, if they do.
        needs_refill: True if memory ran out after the group had shrunk.
        lost: Ranks that are known to be lost.
        silent: Ranks that stopped to answer.
        obstacles: Why the survivors do not continue.
        began: When the driver noticed, on the engine's clock.
        size: Number of workers before.
        workers: The group's workers before, by rank. `infos` are their nodes and processes.
    """

    lifecycle: Lifecycle
    reason: str = ""
    diagnosis: Diagnosis | None = None
    divergence: str = ""
    needs_refill: bool = False
    lost: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    obstacles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began, self.size, self._group = self.lifecycle.now(), self.lifecycle.num_workers, self.lifecycle.group
        self.workers: Sequence[Any] = [] if self._group is None else list(self._group.workers)
        self.infos: Sequence[WorkerInfo] = [] if self._group is None else list(self._group.infos)

    def lose(self, members: Members) -> None:
        """Note that these workers are lost."""
        self.lost |= {rank for rank, worker in enumerate(self.workers) if worker in members}

    @property
    def cause(self) -> str:
        """The cause of the event, for the history."""
        return "; ".join([self._happened, *self.obstacles])

    @property
    def _happened(self) -> str:
        diagnosis = self.diagnosis
        if diagnosis is None or self.needs_refill:
            lost = f"lost {named(self.lost)}; " if self.lost else ""
            return lost + (self.reason if diagnosis is None else f"with {self.size} workers {words(diagnosis)}")
        known = {*self.lost, *(diagnosis.ranks if diagnosis.kind == "died" else ())}
        nodes = None if self._group is None else self._group.nodes_of(known, self.infos)
        told = words(diagnosis, self.lost, nodes)
        if not self.silent or (nodes is not None and nodes.are_dead):
            return told
        return f"{told}; {named(self.silent)} {'does' if len(self.silent) == 1 else 'do'} not answer any more"

    def cause_of(self, why: End, error: BaseException | None, *, in_restart: bool) -> str:
        """Return what ends the group, for the history."""
        if in_restart:
            is_loss = isinstance(error, WorkersLostError)
            return f"{self.cause}; {'no other group could be started' if is_loss else type(error).__name__}"
        if why in _WHERE and self.diagnosis is not None:
            return f"{named(self.diagnosis.ranks)} raised {self.diagnosis.faults[0].type_name} while {_WHERE[why]}"
        return self.cause if why in (End.NO_RETRY, End.NOT_REPEATABLE) else type(error).__name__

    def error(self, why: End, budget: RetryBudget, starts: RetryBudget | None) -> BaseException:
        """Return the error with which a call or a restart ends.

        Args:
            why: Why it ends.
            budget: The call's retries.
            starts: Retries of a start, if they are limited.
        """
        faults = () if self.diagnosis is None else self.diagnosis.faults
        if faults and why in (End.USER_ERROR, *_WHERE):
            return worker_error(faults, "" if why is End.USER_ERROR else self._after_end)
        is_uneven = why is End.UNEVEN_STEPS
        error = UnevenStepsError(self.divergence) if is_uneven else WorkersLostError(self._message(why, budget, starts))
        error.__cause__ = faults[0].error if faults else None
        return error

    def _message(self, why: End, budget: RetryBudget, starts: RetryBudget | None) -> str:
        lifecycle, cause, diagnosis = self.lifecycle, self.cause, self.diagnosis
        spec, last_file = lifecycle.spec, lifecycle.snapshots.last_file_in_words
        match why:
            case End.LOST_COPIES:
                return LOST_ON_ITS_WAY
            case End.CUT_OFF:
                return "Ray was stopped before the state of the last step was in the driver."
            case End.PROGRAM_ENDS:
                return f"{cause}, and the program is about to end, so no other workers are started."
            case End.NO_GROUP:
                return f"No group could be started in {lifecycle.scaling.num_attempts} attempts after: {cause}."
            case End.NO_START if starts is not None:
                return (
                    f"Worker start-up failed: a worker process died, and the {starts.num_retries} allowed retries are "
                    "used up. The log above and Ray's worker logs name the cause; too little memory is a frequent one."
                )
            case End.NOT_REPEATABLE:
                return (
                    f"{cause}, in a call that cannot be repeated, because the process with the copy of the state from "
                    "before the call was lost, too. The next call continues with the state of the surviving workers."
                )
            case End.STATE_LOST if not spec.loses_state:
                return (
                    f"{cause}, and the state was lost with the workers, because the process with its copy was lost, "
                    f"too. {last_file}"
                )
            case End.STATE_LOST:
                return (
                    f"{cause}, and the state was lost with the workers, because `snapshot_every_s=None` switches "
                    f"snapshots off. {last_file} Without that option, or with `snapshot_every_s=60`, such a failure "
                    "costs time only."
                )
        hint = (
            f"{LOOK_AT_RAYS_LOG}: too little memory, say, or a collective that the ranks called with different sizes. "
            if diagnosis is not None and diagnosis.kind == "died"
            else ""
        )
        spent = f"the {budget.num_retries} allowed retries of this call are used up"
        return f"{cause}, and {spent}. {hint}{spec.words.when_spent}".rstrip()

    @property
    def _after_end(self) -> str:
        """The sentence that tells users what became of the state, after workers that were out of sync were ended."""
        snapshots = self.lifecycle.snapshots
        if self.lifecycle.spec.loses_state and snapshots.has_gap:
            lost = "The workers were ended, and their state is lost: `snapshot_every_s=None` switches snapshots off."
            return f"{lost} {snapshots.last_file_in_words}"
        if not snapshots.has_any:
            return ""
        return (
            "The workers were ended, because they are not in the same state any more. The next call starts new ones, "
            f"{snapshots.restored_from()}."
        )
