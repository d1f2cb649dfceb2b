"""`TrainingCall`: one `train` call on one worker, from its first step to its answer.

After workers are lost, the call continues in the surviving workers. Each new call gets a new `TrainingCall`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raysgd.core.engine.shared.interface import Capture
from raysgd.core.engine.shared.types import HeldAtStep, SamplesUsed
from raysgd.core.numbers.meters import NUM_SAMPLES, AverageMeterCollection, MetricSummary
from raysgd.core.numbers.results import ProgressKind, num_samples_of, with_lost
from raysgd.core.numbers.timing import DRIVER
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest, accepted
from raysgd.trainer.worker.hosted import HostedOperator
from raysgd.trainer.worker.operator import around_batches, is_stock
from raysgd.trainer.worker.rank_rows import RankRows
from raysgd.trainer.worker.replica_state import StateCopies
from raysgd.trainer.worker.step_loop import Batches, StepLoop

logger = logging.getLogger(__name__)


class TrainingCall:
    """A `train` call on this worker. It runs the operator's `train_epoch`, and runs it again after an interruption.

    A call that was interrupted by a failure, or paused, continues after its last completed step. A finished call is
    kept until the next one begins, because another rank may not have finished it. Its progress and its metrics are kept
    if the group of workers changes.

    Args:
        hosted: The operator to train.
        copies: Takes the snapshots inside the call.
        begun: Says which call this is, in which epoch it starts, and how many steps it takes. The number of completed
            steps in `begun` is ignored. To continue after these steps, call `take_over`.

    Attributes:
        progress: Progress of the call when the last cursor was detached, or when another rank's progress was taken
            over. Its `is_finished`, `place` and `call_number` are those of now.
        meters: Accumulates the metrics of the call. The metrics of a step are included once the step is completed.
        rows: Stores the metrics that the ranks have last sent to each other, and the metrics of lost ranks.
        answer: This rank's answer to the call. None until the rank has finished the call.
        gate: Agreement with the other ranks to stop the call between two steps.
        samples_before: Record of which samples were used before the call. None if this rank joined during the call.
        began_at: Number to subtract from the cursor's `num_batches_completed` to get that of the call.
        cursor: The cursor from which the call takes its batches. None after `detach`.
        info: The `info` dictionary that is passed to the operator's `train_epoch`. Set before `train_epoch` starts.
        is_running: True while `train_epoch` runs. A second thread of the worker reads this attribute.
    """

    kind: ProgressKind = "train"
    info: Mapping[str, Any]
    is_running = False
    answer: EpochAnswer | None = None
    samples_before: SamplesUsed | None = None
    began_at = 0
    cursor: Any = None

    def __init__(self, hosted: HostedOperator, copies: StateCopies, begun: RunState) -> None:
        self._hosted, self._copies = hosted, copies
        self.progress = RunState(0, begun.epoch_idx, begun.num_requested, call_number=begun.call_number)
        self.meters: AverageMeterCollection = hosted.operator._raysgd.new_meters()
        self.rows, self.gate = RankRows(hosted.name), Gate()

    @property
    def call_number(self) -> int:
        """Number of the training call, by which requests for this call are recognized."""
        return self.progress.call_number

    @property
    def num_batches(self) -> int | None:
        """Number of global batches to use, or None for the rest of the pass."""
        return self.progress.num_requested

    def note(self, **changes: Any) -> None:
        """Replace attributes of `progress`."""
        self.progress = replace(self.progress, **changes)

    def resume(self, request: EpochRequest, share: Any) -> EpochAnswer | HeldAtStep:
        """Continue the call from the step after its last completed step, or return its answer if it is finished.

        Args:
            request: The request of this call.
            share: Data that the driver sends to this worker: a whole dataset, or this worker's new shard of it. None if
                the driver sends no data.

        Returns:
            This rank's answer to the driver, or a `HeldAtStep` if the call stopped between two steps.
        """
        hosted = self._hosted
        if self.answer is not None:
            return self.with_lost(self.answer, hosted.world.rank)
        if self.progress.is_finished:  # another rank finished the call: only report this rank's metrics
            return self._end(hosted.parts.results(self.meters), request)
        if request.hold_at is not None and self.num_batches_completed >= request.hold_at:
            # All ranks had stopped here, as planned, but one of them was lost before the driver had all answers.
            return HeldAtStep(self.num_batches_completed, self.snapshot(), is_planned=True)
        hosted.feed.resume_call(request, share, self.progress.place)
        return self.train_on(hosted.feed.training(request, is_begun=True), request)

    def train_on(self, cursor: Any, request: EpochRequest) -> EpochAnswer | HeldAtStep:
        """Run the operator's `train_epoch` on the remaining batches of the call.

        Args:
            cursor: Draws the batches.
            request: The driver's request to train.

        Returns:
            See `resume`.
        """
        hosted, parts, feed, operator = self._hosted, self._hosted.parts, self._hosted.feed, self._hosted.operator
        internals, is_alone = operator._raysgd, not hosted.world.is_distributed
        callbacks, has_stock_loop = internals.callbacks, parts.has_stock_loop
        self.info = {**request.info, **internals.info_of_call(request.num_steps, self.progress.epoch_idx)}
        epoch_before, taken_before = feed.epoch, cursor.num_batches_taken
        self.attach(cursor)
        if request.hold_at is not None and request.hold_at > self.num_batches_completed:
            self.gate = Gate(request.hold_at)
        num_batches = 0 if self.progress.is_exhausted else self.num_batches_left
        loop = StepLoop(cursor, parts, num_batches, self._committed, request.redraw)
        batches = Batches(hosted.ledger.timing(loop.batches()), loop)
        lost = () if hosted.world.rank else tuple(self.rows.lost.values())
        given = {"info": self.info, "num_steps": request.num_steps, "epoch_idx": self.progress.epoch_idx}
        try:
            with ExitStack() as stack:
                self.is_running = True
                stack.callback(setattr, self, "is_running", False)
                stack.enter_context(hosted.ledger.call())
                stack.enter_context(parts.training(hosted, self, loop))
                stack.enter_context(internals.in_call(self.meters, lost))
                stack.callback(loop.leave_padding)
                after = callbacks.after_batch(operator) if callbacks.are_there else None
                # The library's own `train_epoch` completes each batch's metrics. The user's `train_epoch` does not.
                if after is not None or not has_stock_loop:
                    stack.enter_context(around_batches(operator, "train_batch", after))
                if request.profile:
                    stack.enter_context(hosted.timers.record("train_epoch"))
                if callbacks.are_there:
                    stack.enter_context(callbacks.listening(operator))
                    callbacks.begin_epoch(self, operator)
                    callbacks.note_leg(operator, partial(self._where, cursor, request))
                parts.note_committed()
                args, named = ([batches], given) if has_stock_loop else accepted(operator.train_epoch, batches, **given)
                returned = operator.train_epoch(*args, **named)
                # A `break` may leave accumulated gradients. Step with them before their batches count as used.
                parts.finish(cursor.num_batches_taken > taken_before)
                loop.commit(is_last=True)
        except Held:
            is_planned, self.gate = self.gate.is_planned(self.num_batches_completed), Gate()
            return HeldAtStep(self.num_batches_completed, self.snapshot(), is_planned)
        except BaseException as error:  # also on Ctrl-C, because the next call must begin after a completed step
            parts.check_memory(error)  # if it raises, `suspend` undoes the step, when the error has freed its memory
            if parts.can_undo_now(error, is_alone):
                parts.undo_step()
            elif is_alone and cursor is feed.train_cursor:
                cursor.commit()  # the optimizer has already stepped on the batch, so count the batch as used
            raise
        if not batches.was_touched and feed.epoch == epoch_before:
            feed.count_pass()  # the user's `train_epoch` has used other data, so nothing has counted this epoch yet
        return self._end(returned, request, place=feed.place_of_call(cursor))

    def _where(self, cursor: Any, request: EpochRequest) -> dict[str, Any]:
        """Return the position in the training data from which this group of workers continues the epoch, as plain data.

        The returned dict goes into the run's journal. `raysgd.replay` uses it to find the samples of each step.
        """
        hosted, operator, feed = self._hosted, self._hosted.operator, self._hosted.feed
        is_begun = cursor.is_mid_pass
        consumed = cursor.completed if is_begun else 0
        own = None if is_stock(operator, "train_epoch") else f"`{type(operator).__name__}` overrides"
        return {
            "step": operator.global_step,
            "pass": cursor.pass_index if is_begun else feed.pass_index(cursor),
            "consumed": consumed,
            "num_workers": hosted.world.size,
            "attempt": [request.call_number, request.attempt],
            "window": hosted.parts.leg.rules.num_batches,
            "is_of_call": cursor is not feed.train_cursor,
            "data": cursor.source.layout(consumed, is_begun),
            "obstacle": own and f"{own} `train_epoch`, which takes the steps itself",
        }

    def _committed(self, is_last: bool = False) -> None:
        """Add the metrics of a committed step to those of the epoch. If a snapshot is due, copy the training state.

        Raises:
            Held: All ranks have agreed to stop after this step.
        """
        hosted, gate = self._hosted, self.gate
        self.meters.count_pending()
        if self.meters.has_objects:
            self.meters.note_boundary()
        hosted.ledger.commit()
        is_due = not is_last and self._copies.every is not None and self._copies.is_due(self.num_batches_completed)
        is_asked = not is_last and (gate.proposed is not None or gate.planned is not None)
        if not (is_due or is_asked):
            return
        if hosted.feed.is_divided(self.cursor) and hosted.epoch_obstacle is None:
            hosted.ledger.end_own_work()  # the gate may wait for other ranks
            if is_due:
                self._copies.keep(self.num_batches_completed, self.snapshot())
            if is_asked and self.gate.stops(self.num_batches_completed):
                raise Held
            hosted.ledger.begin_own_work()

    @property
    def can_move(self) -> bool:
        """True if the call can continue after its last completed step in another group, or in another process."""
        hosted = self._hosted
        return hosted.epoch_obstacle is None and hosted.feed.obstacle_of_call(self.cursor) is None

    def snapshot(self) -> Capture:
        """Copy the training state after the last completed step, and return this rank's part of the snapshot.

        The part includes the progress and the metrics of the call.
        """
        self._note_place()
        return self._copies.inside_call(self._hosted.state, self._hosted.world.rank, self.state(with_metrics=True))

    def suspend(self) -> None:
        """Undo the step that was interrupted, and detach the call from its cursor, before it continues in a new group.

        The new group divides the remaining data again.
        """
        if self._hosted.parts.can_be_source:  # if not, this rank will receive the training state of another rank
            self._hosted.parts.undo_step()
        self._note_place()
        self.detach()

    def _note_place(self) -> None:
        if self.cursor is not None:
            self.note(place=self._hosted.feed.place_of_call(self.cursor))

    def _end(self, returned: Any, request: EpochRequest, place: Any = None) -> EpochAnswer:
        """Finish the call with what `train_epoch` returned, and return this rank's answer to the driver."""
        hosted, parts, callbacks = self._hosted, self._hosted.parts, self._hosted.operator._raysgd.callbacks
        returned = callbacks.end_epoch(hosted.operator, returned) if callbacks.are_there else returned
        extra = parts.extra_results()
        extra = {**extra, "timings": hosted.ledger.of_call()} if request.profile else extra
        answer = hosted.answer(returned, request, self.num_batches_completed, extra)
        told = answer.metrics.get(NUM_SAMPLES) if answer.metrics is not None else None
        num_samples = (
            int(told) if isinstance(told, int | float) and math.isfinite(told) else parts.num_samples(self.meters)
        )
        heartbeat = hosted.heartbeat("between calls", num_samples=num_samples)
        before, after = self.samples_before, heartbeat.data
        num_used = after.used_since(before) if before and after else 0
        answer = replace(
            answer,
            epoch_idx=self.progress.epoch_idx,
            call_number=self.progress.call_number,
            heartbeat=heartbeat,
            place=place,
            joint_work=parts.joint_work,
            num_used=num_used,
            weight_sums=hosted.weight_sums() if request.compares_ranks else None,
            largest_batch=hosted.feed.largest_batch,
        )
        self.answer, self.progress = answer, replace(self.progress, is_finished=True)
        parts.end_call()
        hosted.ledger.enter(DRIVER)
        return self.with_lost(answer, hosted.world.rank)

    # ------------------------------------------------------------------------------------ progress and metrics

    def attach(self, cursor: Any) -> None:
        """Let the rest of the call take its batches from this cursor."""
        # `began_at` is set first, because another thread may read `num_batches_completed`.
        self.began_at, self.cursor = cursor.num_batches_completed - self.progress.num_steps, cursor

    @property
    def num_batches_completed(self) -> int:
        """Number of global batches of the call whose steps all ranks have completed."""
        cursor = self.cursor  # read only once, because another thread uses this property and `detach` may intervene
        return self.progress.num_steps if cursor is None else cursor.num_batches_completed - self.began_at

    @property
    def num_batches_left(self) -> int | None:
        """Number of global batches that the call has yet to use. None if it uses the rest of the pass."""
        requested = self.progress.num_requested
        return None if requested is None else max(0, requested - self.num_batches_completed)

    def detach(self) -> None:
        """Drop the cursor, because the call will continue in a new group of workers with a new cursor.

        An interrupted step does not count. An agreement to stop is canceled, because workers that join the new group
        have not taken part in it.
        """
        self.gate = Gate()
        self.meters.drop_pending()
        self.note(num_steps=self.num_batches_completed, is_exhausted=self._has_no_step_left)
        self.cursor = None

    def leave_out_step(self) -> None:
        """Do not count the metrics and samples of the running step, because a callback has left the step out.

        The metrics that ranks have sent each other in this step are discarded, because they include those of the step.
        """
        self.meters.is_left_out = True
        self.rows.forget(self.num_batches_completed)

    @property
    def _has_no_step_left(self) -> bool:
        if self.progress.num_requested is not None:
            return self.num_batches_completed >= self.progress.num_requested
        if self.cursor is None:
            return self.progress.is_exhausted
        return self.num_batches_completed > 0 and not self.cursor.is_mid_pass

    def state(self, with_metrics: bool) -> RunState:
        """Return a record of the call's progress, from which another rank or a later process can continue the call.

        Args:
            with_metrics: Whether to include this rank's metrics. Pass True for a snapshot, or if this rank leaves the
                group. Pass False if this rank stays in the group and reports its metrics itself.
        """
        return replace(
            self.progress,
            num_steps=self.num_batches_completed,
            is_exhausted=self._has_no_step_left,
            name=self.rows.name,
            metrics=self.meters.summary() if with_metrics else None,
            others={} if with_metrics else self._told,
            lost=dict(self.rows.lost),
        )

    def take_over(self, state: RunState) -> None:
        """Continue the call from another rank's progress, but keep this rank's own metrics.

        If the other rank has completed one more step, that step counts on all ranks. This rank was interrupted in that
        step and has discarded the metrics of the step. But in each step, every rank sends the sums of its metrics to
        all ranks. The other rank has received the sums of this rank, from which this rank restores its metrics.

        Args:
            state: The other rank's progress.
        """
        own = state.others.get(self.rows.name)
        if own is not None and self.num_batches_completed < state.num_steps:
            self.meters.correct(own)
        self.progress = replace(state, metrics=None, others={}, lost={}, call_number=self.call_number)
        self.cursor = self.answer = None
        self.meters.skip_to(state.num_steps)
        self.rows.lost.update(state.lost)
        self.rows.keep_lost(state.num_steps, state.others, state.others)

    @property
    def _told(self) -> dict[str, MetricSummary]:
        """The metrics of all ranks as of the last completed step, by rank name."""
        read, rows = self.meters.summary_of, self.rows.as_of(self.num_batches_completed).items()
        return {
            name: row if isinstance(row, MetricSummary) else read(row.layout, row.numbers.tolist())
            for name, row in rows
        }

    def keep_lost(self, present: Collection[str] | None, left: Iterable[RunState] = ()) -> None:
        """Keep the metrics of ranks that are missing from the new group of workers in which the call continues.

        These metrics are added to the result when the call ends.

        Args:
            present: Names of the ranks in the new group. If None, the names are unknown and no rank counts as lost.
            left: Progress and metrics of the ranks that left the group as planned, without a failure.
        """
        told = self._told
        self.rows.keep_lost(self.num_batches_completed, told, told if present is None else present)
        self.rows.lost.update((each.name, each.metrics) for each in left)

    def with_lost(self, answer: EpochAnswer, rank: int) -> EpochAnswer:
        """Return a rank's answer to the driver. On rank 0, add the metrics of ranks that were lost during the call.

        The other ranks do not add them, so that they are counted once.
        """
        if rank or not self.rows.lost or answer.metrics is None:
            return answer
        lost = list(self.rows.lost.values())
        for name in self.meters.object_names if any(map(num_samples_of, lost)) else ():
            logger.warning("the metric object `%s` does not cover the samples that lost workers had processed", name)
        metrics = with_lost(answer.metrics, lost, self.meters.names)
        if metrics is answer.metrics:  # nothing was added, because the user's own training loop computed the metrics
            return answer
        return replace(answer, metrics=metrics, num_inherited=num_samples_of(metrics) - num_samples_of(answer.metrics))


def run_of(kept: Any, call_number: int) -> Any:
    """Return a rank's last record if it belongs to the training call with this number; otherwise None.

    Args:
        kept: The record that a rank keeps of its last training call, even after the call has ended; or None.
        call_number: Number of a training call.
    """
    return kept if kept is not None and kept.call_number == call_number else None


class Held(BaseException):
    """Raised inside the user's training loop to stop an epoch between two steps. The epoch can continue later.

    An `except Exception` in the user's code does not catch this exception.
    """


class Gate:
    """One rank's part in an agreement by which all ranks stop a training call after the same step.

    The driver proposes a step to all ranks, and then reports to them whether all have agreed. A second thread of the
    worker receives these messages. The training thread calls `stops` between two steps.

    Args:
        planned: Number of steps after which all ranks stop without a proposal, or None for no planned stop.
    """

    def __init__(self, planned: int | None = None) -> None:
        self.planned = planned
        self.proposed: int | None = None
        self._is_resolved = False  # True once it is known if all ranks stop at the proposed step
        self._changed = threading.Condition()

    def propose(self, at: int, completed: Callable[[], int]) -> bool:
        """Receive the proposal to stop training after `at` steps.

        Return False if this rank may already have begun the next step.

        Args:
            at: Number of completed steps of the call at which to stop.
            completed: Function that returns the current number of completed steps.
        """
        with self._changed:
            self.proposed, self._is_resolved = at, False
            # `proposed` is set before this check. Therefore, if the training thread completes the step after the check,
            # it finds the proposal, and waits for the decision of all ranks.
            if completed() < at:
                return True
            self.proposed = None
            self._changed.notify_all()
            return False

    def resolve(self, is_agreed: bool) -> None:
        """Accept the current proposal if all ranks have agreed to stop at its step.

        Otherwise, withdraw the proposal.
        """
        with self._changed:
            if not is_agreed:
                self.proposed = None
            self._is_resolved = True
            self._changed.notify_all()

    def stops(self, completed: int) -> bool:
        """Return True if the training call must stop now, after `completed` steps.

        If it is not yet known whether all ranks agree to stop at this step, wait until this is known.
        """
        if self.is_planned(completed):
            return True
        if not self._is_proposed(completed):
            return False
        with self._changed:  # check again, because the second thread may have replaced the proposal by a later step
            while self._is_proposed(completed) and not self._is_resolved:
                self._changed.wait()
            return self._is_proposed(completed)

    def is_planned(self, completed: int) -> bool:
        """Return True if all ranks stop after `completed` steps because this was planned before the call."""
        return self.planned is not None and completed >= self.planned

    def _is_proposed(self, completed: int) -> bool:
        proposed = self.proposed  # read only once, because the second thread may withdraw the proposal at any moment
        return proposed is not None and completed >= proposed


@dataclass(frozen=True)
class RunState:
    """A rank's progress in a training call, from which another process can continue the call.

    Attributes:
        num_steps: Number of completed steps of the call.
        epoch_idx: Index of the pass over the data in which the call started.
        num_requested: Number of steps that the call was asked to take, or None for the rest of the pass.
        is_exhausted: True if all steps are done. User code after the last step may still have to run.
        is_finished: True if the call is complete, including user code after the last step.
        name: Name of the rank that created this record. Unlike a number, it stays the same in later groups.
        metrics: Metrics that this rank has measured in the call. None if the rank continues in the next group and
            reports its metrics itself.
        others: Metrics of all ranks as of the last completed step, as far as this rank received them, by rank name.
            Empty if `metrics` is set.
        lost: Metrics of lost ranks, by rank name.
        place: Position in the data that the user passed to this call. None if the call uses registered data.
        call_number: Number of the training call.
    """

    num_steps: int
    epoch_idx: int
    num_requested: int | None
    is_exhausted: bool = False
    is_finished: bool = False
    name: str = ""
    metrics: MetricSummary | None = None
    others: Mapping[str, MetricSummary] = field(default_factory=dict)
    lost: Mapping[str, MetricSummary] = field(default_factory=dict)
    place: Mapping[str, Any] | None = None
    call_number: int = 0

    def __str__(self) -> str:
        return f"after {self.num_steps} steps"

    def for_others(self) -> RunState:
        """Return a copy for ranks that do not continue this rank's metrics: without its metric objects."""
        return self if self.metrics is None else replace(self, metrics=self.metrics.without_objects())
