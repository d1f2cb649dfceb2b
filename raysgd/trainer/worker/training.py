"""Runs the trainer's `train`, `validate` and `predict` calls in one worker process.

After workers are lost, a `train` call continues in the surviving workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from raysgd.core.engine.shared.replica import Capture, taken_over
from raysgd.core.engine.shared.types import Heartbeat, HeldAtStep, ReplicaProgress
from raysgd.core.numbers.meters import MetricSummary
from raysgd.core.numbers.metric_meters import is_weight
from raysgd.core.numbers.results import CallProgress, ProgressKind, as_number
from raysgd.trainer.messages.begun import BegunEpoch
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest, accepted
from raysgd.trainer.messages.joint_work import JointWork
from raysgd.trainer.messages.prediction import PredictionPlace, PredictRequest, Work, outputs_of
from raysgd.trainer.worker.data.around_batch import around_batches
from raysgd.trainer.worker.data.epoch_run import RunState, run_of
from raysgd.trainer.worker.hosted import HostedOperator
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.state.copies import StateCopies
from raysgd.trainer.worker.step_loop import StepLoop
from raysgd.trainer.worker.training_call import TrainingCall

logger = logging.getLogger(__name__)

_PHASES = {"train": "training", "validation": "validating", "test": "testing", "predict": "predicting"}


@dataclass(frozen=True)
class EvaluationCall:
    """The `validate` or `predict` call that a worker is running at the moment.

    Attributes:
        cursor: Object that supplies the call's batches. Its `num_steps_taken` counts the batches taken so far.
        began_at: The cursor's `num_steps_taken` when the call began.
        num_steps: Number of batches to use, or None to use all remaining batches.
        info: The `info` dictionary that is passed to the operator's method.
        kind: What the call does: validate, test or predict.
    """

    cursor: Any
    began_at: int
    num_steps: int | None
    info: Mapping[str, Any]
    kind: ProgressKind


class ReplicaCalls:
    """Runs the driver's calls on this worker's training operator, and reports their progress.

    A training call that was interrupted by a failure, or paused, continues after its last completed step.

    Args:
        snapshot_every_n_steps: Copy the training state each time a training call has completed this many steps. None to
            make no copies inside a call.
    """

    _hosted: HostedOperator
    _training: TrainingCall | None = None  # the current or last training call
    _evaluation: EvaluationCall | None = None  # the running call to `validate` or `predict`
    # On a spare worker that validates: returns True if the validation must end early. None on all other workers.
    _has_left: Callable[[], bool] | None = None

    def __init__(self, snapshot_every_n_steps: int | None) -> None:
        self._ledger = Ledger()
        self._copies = StateCopies(snapshot_every_n_steps, self._ledger)

    def _host(self, hosted: HostedOperator) -> None:
        """Use this new operator, which has not run any call yet, for all later calls."""
        self._hosted = hosted
        self._forget_call()
        self._last_hold = 0, False  # number of the last proposal to stop, and whether all ranks have agreed to it

    def _forget_call(self) -> None:
        """Discard what is known about the last training call, for example after other training state was loaded."""
        self._training = None
        self._copies.forget_call()

    # ------------------------------------------------------------------------------------ training

    def train_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Run the operator's `train_epoch` from the start of the requested call.

        Args:
            request: The driver's request to train.
            share: Data that the driver sends to this worker: a whole dataset, or this worker's shard of it. None if the
                driver sends no data, for example because this worker already has it.

        Returns:
            This worker's answer to the driver, or a `HeldAtStep` if the call stopped between two steps.
        """
        hosted = self._hosted
        # `_training` stays None until the `TrainingCall` is created below. If an error occurs before that, there is no
        # call to resume.
        raised, self._training = self._unfinished, None
        if raised is not None and raised.cursor is hosted.feed.train_cursor is not None:
            # The user's code raised an error in the last call. Train again on the batch in which the error occurred.
            hosted.feed.go_to(hosted.feed.epoch, hosted.feed.position())
        self._ledger.begin_call()
        hosted.parts.begin_call()
        if share is not None:
            hosted.feed.take_share("train", request, share)
        cursor = hosted.feed.training(request)
        hosted.set_timers(request.profile)
        if self._copies.every is not None:
            self._copies.forget_call()
        begun = RunState(0, hosted.feed.pass_index(cursor), request.num_steps, call_number=request.call_number)
        call = self._training = TrainingCall(hosted, self._copies, begun)
        call.samples_before = hosted.feed.samples_used()
        return call.train_on(cursor, request)

    def resume_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Continue a training call that was interrupted or paused, from the step after its last completed step.

        Args:
            request: The request of the call to continue.
            share: See `train_epoch`.

        Returns:
            See `train_epoch`.
        """
        call = run_of(self._training, request.call_number)
        # None means that this rank had not begun the call when the call was interrupted.
        return self.train_epoch(request, share) if call is None else call.resume(request, share)

    def resume_left(self, begun: BegunEpoch, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Continue an epoch that an earlier run left unfinished, possibly in another process.

        This worker already has the training state of the step at which the earlier run stopped.

        Args:
            begun: The step at which the earlier run left the epoch, and the metrics of that run's ranks.
            request: The driver's request to train.
            share: See `train_epoch`.

        Returns:
            See `train_epoch`.
        """
        hosted, call = self._hosted, self._unfinished
        if not (begun.is_exhausted or hosted.feed.training(request).is_mid_pass):
            # The user has meanwhile registered other data. Without a position to continue from, start the epoch over.
            return self.train_epoch(request, share)
        self._ledger.begin_call()
        hosted.parts.begin_call()
        hosted.set_timers(request.profile)
        if call is not None and (call.num_completed, call.epoch_idx) == (begun.num_steps, begun.epoch_idx):
            call.detach()  # the earlier run used this same process, which still holds the epoch's metric objects
            call.call_number = request.call_number
            return call.resume(request, share)
        for name in begun.objects:
            logger.warning("the metric object `%s` will cover only what follows in this epoch", name)
        lost = {str(number): metrics for number, metrics in enumerate(begun.lost)}
        first = RunState(
            begun.num_steps,
            begun.epoch_idx,
            request.num_steps,
            begun.is_exhausted,
            lost=lost,
            call_number=request.call_number,
        )
        world = hosted.world
        own = taken_over(begun.by_rank, world.rank, world.size)
        return self._go_on_from(first, own, begun.by_rank).resume(request, share)

    def go_on_left(self, begun: BegunEpoch, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Continue a `resume_left` call that was interrupted or paused.

        If this worker had not begun the call, begin it now. See `resume_left` for the arguments and the return value.
        """
        has_begun = run_of(self._training, request.call_number) is not None
        return self.resume_epoch(request, share) if has_begun else self.resume_left(begun, request, share)

    def capture_here(self) -> Capture:
        """Copy the training state after the last completed step, and return this rank's part of the copy.

        See `RegroupingReplica`.
        """
        call, hosted = self._unfinished, self._hosted
        if call is None or not call.can_move:
            return self._copies.after_call(hosted.state, hosted.world.rank, None)
        return call.snapshot()

    # ------------------------------------------------------------------------------------ a call in a new group

    def replica_progress(self) -> ReplicaProgress:
        """Return how far this worker has come in the training call that was interrupted or paused.

        If there is no such call, return the progress of the last completed training call. A completed call counts as
        one more step, so that ranks that have completed it are ahead of the others. Before any call, the progress is 0.
        """
        self._ledger.note_recovery()
        hosted, feed, call = self._hosted, self._hosted.feed, self._training
        obstacle, is_whole = hosted.group_obstacle, hosted.parts.is_whole
        if call is None or call.is_finished:
            num_steps = call.num_completed + 1 if call is not None else 0
            return ReplicaProgress(num_steps, is_whole, obstacle or feed.order_obstacle)
        obstacle = obstacle or hosted.epoch_obstacle or feed.order_obstacle or feed.obstacle_of_call(call.cursor)
        return ReplicaProgress(call.num_completed, is_whole, obstacle, feed.progress_text())

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Answer the driver's proposal to stop training after a step. All ranks must agree before any rank stops.

        Return the step, as a number of completed steps; None if this worker cannot stop there. The worker's second
        thread calls this method. See `RegroupingReplica` for the arguments.
        """
        # Ignore a proposal that arrives too late. No outcome would follow, so training would wait at the step forever.
        if number <= self._last_hold[0]:
            return None
        self._last_hold = number, False
        call = self._unfinished
        if call is None or self._running is None or not call.can_move:
            return None
        step = call.num_completed + margin if at is None else at
        return step if call.gate.propose(step, lambda: call.num_completed) else None

    def resolve_hold(self, number: int, is_agreed: bool) -> None:
        """Receive the outcome of a proposal to stop. See `RegroupingReplica`.

        Args:
            number: Number of the proposal.
            is_agreed: If True, all ranks stop at the proposed step. If False, no rank stops.
        """
        if self._training is not None and number == self._last_hold[0]:
            self._last_hold = number, is_agreed
            self._training.gate.resolve(is_agreed)

    def last_hold(self) -> tuple[int, bool]:
        """Return a pair: the number of the last proposal to stop, and whether all ranks agreed to the proposal."""
        return self._last_hold

    def _suspend_call(self) -> None:
        """Prepare the unfinished training call to continue in another group of workers."""
        self._hosted.feed.break_off()
        self._copies.forget_call()
        call = self._unfinished
        if call is not None:
            call.suspend()

    def _handed_over(self) -> tuple[Mapping[str, Any], RunState | None]:
        """Return the training state and the progress of the training call, to be sent to other ranks."""
        call = self._training
        return self._hosted.state.read(), None if call is None else call.state(with_metrics=False)

    def _take_over(self, state: Mapping[str, Any], run: RunState | None) -> None:
        """Restore another rank's training state, and continue the training call from that rank's progress."""
        self._hosted.restore(state, None)
        if run is None:
            self._training = None
            return
        own = run_of(self._training, run.call_number) or TrainingCall(self._hosted, self._copies, run)
        own.take_over(run)
        self._training = own

    def _go_on_from(
        self, first: RunState, own: Sequence[MetricSummary], everyones: Sequence[MetricSummary]
    ) -> TrainingCall:
        """Prepare to continue a training call from a record of it, and return this call.

        The ranks divide the metrics in the record among themselves. Each rank adds its share to its own metrics, and
        keeps the other shares, in case another rank is lost before its next step. All ranks call this method together.

        Args:
            first: Progress from which the call continues.
            own: The metrics that this rank takes over. See `taken_over`.
            everyones: The metrics of every rank of the earlier group, without metric objects.
        """
        hosted = self._hosted
        rank, size = hosted.world.rank, hosted.world.size
        # New names, so that this rank knows the names of all ranks. They are as long as the names that they replace.
        names = [f"{first.call_number:016x}{each:016x}" for each in range(size)]
        hosted.name = names[rank]
        # An earlier, lost rank may have had one of these names.
        lost = {f"left {number}": metrics for number, metrics in enumerate(first.lost.values())}
        call = TrainingCall(hosted, self._copies, first)
        call.meters.add_all(own)
        call.take_over(replace(first, others={}, lost=lost))
        if hosted.exchanges_rows:
            shares = [taken_over(everyones, each, size) for each in range(size)]
            call.rows.note(first.num_steps - 1, dict(zip(names, map(self._merged, shares), strict=True)))
        self._training = call
        return call

    def _merged(self, parts: Sequence[MetricSummary]) -> MetricSummary:
        meters = self._hosted.operator._raysgd.new_meters()
        meters.add_all(parts)
        return meters.summary()

    # ------------------------------------------------------------------------------------ validation and prediction

    def validate(self, request: EpochRequest, share: Any = None) -> EpochAnswer:
        """Run the operator's `validate` once, and return this worker's answer to the driver.

        Args:
            request: The driver's request to validate.
            share: See `train_epoch`.
        """
        hosted, operator, feed = self._hosted, self._hosted.operator, self._hosted.feed
        with self._ledger.evaluating(), hosted.inside_epoch() if request.is_inside else nullcontext():
            options = hosted.parts.validation_options(request)
            hosted.set_timers(request.profile)
            feed.take_share("validation", request, share)
            if feed.ray_loader("validation") is not None:
                # With Ray Data, all ranks must start from the beginning of the data together.
                request = replace(request, starts_over=True)
            with (
                hosted.evaluating() as parts,
                feed.validating(request) as cursor,
                operator._raysgd.in_call(parts.leg),
                around_batches(operator, "validate_batch"),
            ):
                began_at = cursor.num_steps_taken
                batches = StepLoop(cursor, parts, request.num_steps, redraw=request.redraw).batches()
                if (has_left := self._has_left) is not None:
                    batches = takewhile(lambda batch: not has_left(), batches)
                args, named = accepted(operator.validate, batches, info=dict(request.info), **options)
                call = EvaluationCall(cursor, began_at, request.num_steps, request.info, "validation")
                with self._evaluating(call), hosted.timers.record("validation"):
                    returned = operator.validate(*args, **named)
            answer = hosted.answer(returned, request, cursor.num_steps_taken - began_at)
            return replace(answer, epoch_idx=max(0, feed.epoch - 1))

    def predict(self, request: PredictRequest, work: Work, share: Any = None) -> list[Any]:
        """Predict this worker's batches in one round of a `predict` call. The driver splits such a call into rounds.

        Args:
            request: The driver's request to predict.
            work: This worker's batches in this round, or the row indices of these batches.
            share: The dataset to which row indices refer, the same in all rounds. None if there is none, or if this
                worker already has it.

        Returns:
            The output for each batch, as arrays.
        """
        hosted, operator, place = self._hosted, self._hosted.operator, PredictionPlace(request)
        call = EvaluationCall(place, 0, request.total, request.info, "predict")
        with self._ledger.evaluating():
            hosted.set_timers(profile=False)
            with self._evaluating(call), hosted.predicting():
                batches = hosted.to_predict(request, work, share)
                return outputs_of(operator, batches, request, place, hosted.as_array)

    # ------------------------------------------------------------------ progress, also for a second thread

    @contextmanager
    def _evaluating(self, call: EvaluationCall) -> Iterator[None]:
        """Inside the block, make the progress of this call visible to the worker's second thread."""
        self._evaluation, self._hosted.operator._raysgd.latest_metrics = call, {}
        try:
            yield
        finally:
            self._evaluation = None

    @property
    def _unfinished(self) -> TrainingCall | None:
        """The training call that this worker has started but not finished, or None if there is no such call."""
        call = self._training
        return None if call is None or call.is_finished else call

    @property
    def _running(self) -> TrainingCall | EvaluationCall | None:
        """The call that this worker is running at the moment, or None between calls."""
        call = self._training
        return call if call is not None and call.is_running else self._evaluation

    def heartbeat(self) -> Heartbeat:
        """Return this worker's current progress, and how its time was spent. The worker's second thread calls this."""
        hosted, call, running = self._hosted, self._unfinished, self._running
        if call is None:
            return hosted.heartbeat("between calls" if running is None else _PHASES[running.kind])
        if running is None:
            return hosted.heartbeat("broken off", call.num_completed)
        return hosted.heartbeat("training", call.num_completed, hosted.parts.num_samples(call), self._copies.newest)

    def joint_work_of(self, error: BaseException) -> JointWork | None:
        """Return the record of this rank's joint actions: those that all ranks must take in the same order in a call.

        Return None if different actions on the ranks cannot be the cause of `error`.
        """
        parts = self._hosted.parts
        return parts.joint_work if parts.may_be_parted(error) else None

    def progress(self) -> CallProgress | None:
        """Return the progress of the running call, or None between calls. The worker's second thread calls this."""
        running = self._running
        if running is None or (cursor := running.cursor) is None:
            return None
        reported = self._hosted.operator._raysgd.latest_metrics
        latest = {name: as_number(value) for name, value in reported.items() if not is_weight(name)}
        metrics = {name: number for name, number in latest.items() if number is not None}
        total, source = running.num_steps, cursor.source
        return CallProgress(
            num_steps=cursor.num_steps_taken - running.began_at,
            total=source.num_steps() if total is None and source is not None else total,
            epoch_idx=running.info.get("epoch_idx", max(0, self._hosted.feed.epoch - 1)),
            num_epochs=running.info.get("num_epochs"),
            loss=metrics.get("train_loss" if running.kind == "train" else "val_loss"),
            kind=running.kind,
            metrics=metrics,
        )
