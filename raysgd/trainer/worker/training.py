"""Runs the trainer's `train`, `validate` and `predict` calls in one worker process.

After workers are lost, a `train` call continues in the surviving workers.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, cast

from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import Heartbeat, HeldAtStep, ReplicaProgress
from raysgd.core.numbers.meters import BATCH_COUNT, NUM_SAMPLES, MetricSummary, is_weight, refuse_taken
from raysgd.core.numbers.results import CallProgress, ProgressKind, as_number
from raysgd.core.numbers.timers import TimerCollection
from raysgd.trainer.messages.begun import BegunEpoch
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest, accepted
from raysgd.trainer.messages.joint_work import JointWork
from raysgd.trainer.messages.prediction import PredictionPlace, PredictRequest, Work, outputs_of
from raysgd.trainer.worker.data import epoch_run
from raysgd.trainer.worker.data.around_batch import around_batches, forget, take_outside
from raysgd.trainer.worker.data.batch_streams import WatchedBatches, redrawing
from raysgd.trainer.worker.data.epoch_run import EpochRun, Gate, HeldAtBoundary, RunState
from raysgd.trainer.worker.data.loop import Loop
from raysgd.trainer.worker.data.rank_rows import RankRows
from raysgd.trainer.worker.hosted import HostedOperator, is_of_library
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.state.copies import StateCopies

logger = logging.getLogger(__name__)

_PHASES = {"train": "training", "validation": "validating", "test": "testing", "predict": "predicting"}


@dataclass(frozen=True)
class RunningCall:
    """The `train`, `validate` or `predict` call that a worker is running at the moment.

    Attributes:
        stream: Object that supplies the call's batches. Its `num_steps_taken` counts the batches taken so far.
        began_at: The stream's `num_steps_taken` when the call began.
        num_steps: Number of batches to use, or None to use all remaining batches.
        info: The `info` dictionary that is passed to the operator's method.
        kind: What the call does: train, validate, test or predict.
    """

    stream: Any
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
    _running: RunningCall | None = None
    _run: EpochRun | None = None  # record of the current or last training call
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
        self._name = uuid.uuid4().hex  # identifies this rank to other ranks, even in later groups
        self._timers = TimerCollection()  # the timers of the operator, which measure only in calls with `profile`

    def _forget_call(self) -> None:
        """Discard what is known about the last training call, for example after other training state was loaded."""
        self._running = self._run = None
        self._copies.forget_call()

    # ------------------------------------------------------------------------------------ training

    def train_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Run the operator's `train_epoch` from the start of the requested call.

        Args:
            request: The driver's request to train.
            share: This worker's shard of a dataset that the driver has divided. None if the driver divides no dataset,
                or if this worker already has its shard.
        """
        hosted, loop = self._hosted, self._hosted.loop
        # If this call fails before it starts, `_run` stays None, so that there is no call to resume.
        raised, self._run = self._unfinished, None
        if raised is not None and raised.stream is hosted.feed.train_stream is not None:
            # The user's code raised an error in the last call: train on that batch again.
            hosted.feed.go_to(hosted.feed.epoch, hosted.feed.position())
        self._ledger.begin_call()
        loop.begin_call()
        if share is not None:
            hosted.feed.take_share("train", request, share)
        stream = loop.stream(request)
        self._set_timers(request.profile)
        if self._copies.every is not None:
            self._copies.forget_call()
        run = self._run = self._new_run(request.call, loop.pass_index(stream), request.num_steps)
        run.ledger_before = loop.ledger()
        return self._go_through(run, stream, request)

    def resume_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Continue a training call that was interrupted or paused, from the step after its last completed step.

        Args:
            request: The request of the call to continue.
            share: See `train_epoch`.
        """
        run, loop = epoch_run.run_of(self._run, request.call), self._hosted.loop
        if run is None:  # this rank had not begun the call when it was interrupted
            return self.train_epoch(request, share)
        if run.answer is not None:
            return self._complete(run, run.answer)
        if run.is_finished:  # another rank finished the call: only report this rank's metrics
            return self._finish(run, loop.results(run), request)
        self._hosted.feed.begin_again(request, share, run.place)
        return self._go_through(run, loop.stream(request, is_begun=True), request)

    def resume_left(self, begun: BegunEpoch, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Continue an epoch that an earlier run left unfinished, possibly in another process.

        This worker already has the training state of the step at which the earlier run stopped.

        Args:
            begun: The step at which the earlier run left the epoch, and the metrics of that run's ranks that this rank
                includes in its own metrics.
            request: The driver's request to train.
            share: See `train_epoch`.
        """
        loop, run = self._hosted.loop, self._unfinished
        if not (begun.is_exhausted or loop.stream(request).is_mid_pass):
            # The user has registered other data since, so there is no position to continue from: start the epoch over.
            return self.train_epoch(request, share)
        self._ledger.begin_call()
        loop.begin_call()
        self._set_timers(request.profile)
        if run is not None and (run.num_completed, run.epoch_idx) == (begun.num_steps, begun.epoch_idx):
            run.detach()  # the earlier run used this same process, which still holds the epoch's metric objects
            run.call = request.call
            return self.resume_epoch(request, share)
        for name in begun.objects:
            logger.warning("the metric object `%s` will cover only what follows in this epoch", name)
        lost = {f"left {number}": metrics for number, metrics in enumerate(begun.lost)}
        first = RunState(
            begun.num_steps, begun.epoch_idx, request.num_steps, begun.is_exhausted, lost=lost, call=request.call
        )
        self._go_on_from(first, [replace(first, metrics=metrics) for metrics in begun.by_rank])
        return self.resume_epoch(request, share)

    def go_on_left(self, begun: BegunEpoch, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Continue a `resume_left` call that was interrupted or paused.

        If this worker had not begun the call, begin it now. See `resume_left` for the arguments.
        """
        has_begun = epoch_run.run_of(self._run, request.call) is not None
        return self.resume_epoch(request, share) if has_begun else self.resume_left(begun, request, share)

    def _go_through(self, run: EpochRun, stream: Any, request: EpochRequest) -> EpochAnswer | HeldAtStep:
        """Run the operator's `train_epoch` on the remaining batches of a training call.

        Args:
            run: Record of the training call.
            stream: Stream from which the batches come.
            request: The driver's request to train.
        """
        hosted, loop, feed, operator = self._hosted, self._hosted.loop, self._hosted.feed, self._hosted.operator
        internals = operator._raysgd
        callbacks = internals.callbacks
        info = {**request.info, **internals.info_of_call(request.num_steps, run.epoch_idx)}
        epoch_before, place_before = feed.epoch, internals.place
        run.attach(stream)
        if request.hold_at is not None and request.hold_at > run.num_completed:
            run.gate = Gate(request.hold_at)
        stream.at_boundary = partial(self._at_boundary, loop, run, stream)
        coming = iter(()) if run.is_exhausted else stream.take(run.num_steps_left)
        coming = coming if request.redraw is None else redrawing(coming, request.redraw)
        batches = WatchedBatches(self._ledger.timing(coming), stream)
        began_at = stream.num_steps_taken - run.num_completed
        running = RunningCall(stream, began_at, request.num_steps, info, "train")
        internals.meters_to_fill = run.meters
        internals.lost = () if hosted.world.rank else tuple(run.rows.lost.values())
        forget(internals)
        is_stock = loop.has_stock_loop
        given = {"info": info, "num_steps": request.num_steps, "epoch_idx": run.epoch_idx}
        try:
            with ExitStack() as stack:
                stack.enter_context(self._shown(running))
                stack.enter_context(self._ledger.call(loop.first_bin))
                stack.enter_context(hosted.training(run, stream))
                place = internals.place = loop.place
                after = callbacks.after_batch(operator, place) if callbacks.are_there else None
                # The library's own `train_epoch` completes each batch's metrics. The user's `train_epoch` does not.
                if after is not None or not is_stock:
                    stack.enter_context(around_batches(operator, "train_batch", place, after))
                if callbacks.are_there:
                    stack.enter_context(callbacks.listening(operator))
                if request.profile:
                    stack.enter_context(self._timers.record("train_epoch"))
                if callbacks.are_there:
                    callbacks.begin_epoch(run, operator)
                    callbacks.begin_leg(operator, partial(self._where, stream, request))
                loop.note_boundary()
                args, named = ([batches], given) if is_stock else accepted(operator.train_epoch, batches, **given)
                returned = operator.train_epoch(*args, **named)
                stream.settle()
        except HeldAtBoundary:
            is_planned, run.gate = run.gate.is_planned(run.num_completed), Gate()
            return HeldAtStep(run.num_completed, self._snapshot(run), is_planned)
        except BaseException as error:  # also on Ctrl-C, because the next call must begin after a completed step
            is_alone = not hosted.world.is_distributed
            if loop.can_return and (is_alone or not loop.is_lost(error)):
                loop.return_to_boundary()
            elif is_alone and stream is feed.train_stream:
                stream.settle()  # the optimizer has already stepped on the batch, so count the batch as used
            raise
        finally:
            internals.meters_to_fill = stream.at_boundary = None
            internals.place = place_before
        if not batches.was_touched and feed.epoch == epoch_before:
            feed.begin_pass()  # count an epoch, because the user's `train_epoch` has used other data than the batches
        return self._finish(run, returned, request, place=feed.place_of_call(stream))

    def _where(self, stream: Any, request: EpochRequest) -> dict[str, Any]:
        """Describe the position in the training data from which this group of workers continues the epoch.

        The description goes into the run's journal. `raysgd.replay` uses it to find the samples of each step.
        """
        hosted, operator, feed = self._hosted, self._hosted.operator, self._hosted.feed
        is_begun, place = stream.is_mid_pass, cast("Any", hosted.loop.place)
        consumed = stream.completed if is_begun else 0
        own = None if is_of_library(type(operator).train_epoch) else f"`{type(operator).__name__}` overrides"
        return {
            "step": operator.global_step,
            "pass": stream.pass_index if is_begun else hosted.loop.pass_index(stream),
            "consumed": consumed,
            "num_workers": hosted.world.size,
            "attempt": [request.call, request.attempt],
            "window": place.window,
            "is_of_call": stream is not feed.train_stream,
            "data": stream.source.layout(consumed, is_begun),
            "obstacle": own and f"{own} `train_epoch`, which takes the steps itself",
        }

    def _finish(self, run: EpochRun, returned: Any, request: EpochRequest, place: Any = None) -> EpochAnswer:
        loop, callbacks = self._hosted.loop, self._hosted.operator._raysgd.callbacks
        returned = callbacks.end_epoch(self._hosted.operator, returned) if callbacks.are_there else returned
        extra = loop.extra_results()
        extra = {**extra, "timings": self._ledger.of_call()} if request.profile else extra
        answer = self._answer(returned, request, run.num_completed, extra)
        told = answer.metrics.get(NUM_SAMPLES) if answer.metrics is not None else None
        num_samples = int(told) if isinstance(told, int | float) and math.isfinite(told) else loop.num_samples(run)
        heartbeat = self._heartbeat("between calls", -1, num_samples)
        before, after = run.ledger_before, heartbeat.data
        num_used = after.used_since(before) if before and after else 0
        beside = {"heartbeat": heartbeat, "place": place, "joint_work": loop.joint_work, "num_used": num_used}
        beside["weight_sums"] = self._hosted.weight_sums() if request.compares_ranks else None
        answer = replace(answer, epoch_idx=run.epoch_idx, call=run.call, **beside)
        run.finish(answer)
        loop.end_call()
        self._ledger.end_call()
        return self._complete(run, answer)

    def _complete(self, run: EpochRun, answer: EpochAnswer) -> EpochAnswer:
        """Return this rank's answer to the driver. On rank 0, add the metrics of workers that were lost meanwhile."""
        return answer if self._hosted.world.rank or not run.rows.lost else run.with_lost(answer)

    def _set_timers(self, profile: bool) -> None:
        """If `profile` is True, reset and enable the operator's timers. Otherwise, disable the timers."""
        if profile:
            self._timers.reset()
            self._timers.enable()
        else:
            self._timers.disable()
        self._hosted.operator.timers = self._timers

    def _answer(
        self, returned: Any, request: EpochRequest, num_steps: int, extra: Mapping[str, Any] | None = None
    ) -> EpochAnswer:
        """Create the answer that this worker sends to the driver at the end of a training or validation call.

        Args:
            returned: The return value of the operator's `train_epoch` or `validate`. A value that is not a mapping is
                sent unchanged.
            request: The driver's request.
            num_steps: Number of steps that the call has taken.
            extra: Metrics that the library adds to those in `returned`.
        """
        if not isinstance(returned, Mapping):
            return EpochAnswer(None, returned, num_steps)
        plain, together = self._hosted.loop.plain, {**take_outside(self._hosted.operator._raysgd), **returned}
        for name in together.keys() - {BATCH_COUNT}:
            refuse_taken(name)
        values = {**(extra or {}), **{name: plain(value) for name, value in together.items()}}
        if request.profile:
            values["profile"] = self._timers.stats()
        behind = (returned.totals, returned.objects) if isinstance(returned, MetricSummary) else ()
        return EpochAnswer(MetricSummary(values, *behind), None, num_steps)

    def _at_boundary(self, loop: Loop, run: EpochRun, stream: Any) -> None:
        """Finish a step that all ranks have completed.

        Add the step's metrics to those of the epoch, and copy the training state if a snapshot is due.

        Raises:
            HeldAtBoundary: All ranks have agreed to stop after this step.
        """
        loop.note_boundary()
        run.meters.count_held()
        if run.meters.has_objects:
            run.meters.note_boundary()
        self._ledger.commit()
        is_due = self._copies.every is not None and self._copies.is_due(run.num_completed)
        is_asked = run.gate.proposed is not None or run.gate.planned is not None
        if not (is_due or is_asked):
            return
        if not loop.can_resume(stream) or self._hosted.epoch_obstacle is not None:
            return
        if is_due:
            self._copies.keep(run.num_completed, self._snapshot(run))
        if is_asked and run.gate.stops(run.num_completed):
            raise HeldAtBoundary

    def _snapshot(self, run: EpochRun) -> Capture:
        self._note_place(run)
        return self._copies.inside_call(self._hosted.state, self._hosted.world.rank, run.state(with_metrics=True))

    def _note_place(self, run: EpochRun) -> None:
        if run.stream is not None:
            run.place = self._hosted.feed.place_of_call(run.stream)

    def capture_here(self) -> Capture:
        """Copy the training state as it is after the last completed step. See `RegroupingReplica`."""
        run, hosted = self._unfinished, self._hosted
        if run is None or hosted.epoch_obstacle is not None or hosted.feed.obstacle_of_call(run.stream) is not None:
            return self._copies.after_call(hosted.state, hosted.world.rank, None)
        return self._snapshot(run)

    # ------------------------------------------------------------------------------------ a call in a new group

    def replica_progress(self) -> ReplicaProgress:
        """Return how far this worker has come in the training call that was interrupted or paused.

        If there is no such call, return the progress of the last completed training call.
        """
        self._ledger.leave_group()
        hosted, loop, run = self._hosted, self._hosted.loop, self._run
        obstacle = hosted.group_obstacle
        if run is None or run.is_finished:
            num_steps = run.num_completed + 1 if run is not None else 0
            return ReplicaProgress(num_steps, loop.is_whole, obstacle or loop.order_obstacle)
        obstacle = obstacle or hosted.epoch_obstacle or loop.order_obstacle
        obstacle = obstacle or hosted.feed.obstacle_of_call(run.stream)
        return ReplicaProgress(run.num_completed, loop.is_whole, obstacle, loop.progress_text())

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Propose a step after which this worker stops training if all other ranks agree.

        The worker's second thread calls this method. See `RegroupingReplica`.
        """
        run = self._unfinished
        # Ignore a proposal that arrives late, after it was settled: training would wait at its step forever.
        if number <= self._last_hold[0]:
            return None
        self._last_hold = number, False
        hosted = self._hosted
        if run is None or self._running is None or hosted.epoch_obstacle is not None:
            return None
        if hosted.feed.obstacle_of_call(run.stream) is not None:
            return None
        step = run.num_completed + margin if at is None else at
        return step if run.gate.propose(step, lambda: run.num_completed) else None

    def settle_hold(self, number: int, is_agreed: bool) -> None:
        """Tell this worker the outcome of a proposal to stop. See `RegroupingReplica`.

        Args:
            number: Number of the proposal.
            is_agreed: If True, all ranks stop at the proposed step. If False, no rank stops.
        """
        if self._run is not None and number == self._last_hold[0]:
            self._last_hold = number, is_agreed
            self._run.gate.settle(is_agreed)

    def last_hold(self) -> tuple[int, bool]:
        """Return the number of the last proposal to stop, and True if all ranks agreed. See `RegroupingReplica`."""
        return self._last_hold

    def _leave_group(self) -> None:
        """Prepare the running training call to continue in another group of workers.

        Undo the step that was interrupted. Detach the call from its data stream, because the new group divides the
        remaining data anew.
        """
        loop, run = self._hosted.loop, self._unfinished
        loop.break_off()
        self._copies.forget_call()
        if run is not None:
            if loop.is_whole:  # if not, this rank will receive the training state of another rank
                loop.return_to_boundary()
            self._note_place(run)
            run.detach()

    def _handed_over(self) -> tuple[Mapping[str, Any], RunState | None]:
        """Return the training state and the progress of the training call, to be sent to other ranks."""
        return self._hosted.state.read(), None if self._run is None else self._run.state(with_metrics=False)

    def _take_over(self, state: Mapping[str, Any], run: RunState | None) -> None:
        """Restore another rank's training state, and continue the training call from that rank's progress."""
        self._hosted.restore(state, None)
        if run is None:
            self._run = None
            return
        own = epoch_run.run_of(self._run, run.call) or self._new_run(run.call, run.epoch_idx, run.num_requested)
        own.take_over(run)
        self._run = own

    def _go_on_from(self, first: RunState, parts: Iterable[RunState]) -> None:
        """Prepare to continue a training call.

        Args:
            first: Progress from which the call continues.
            parts: Metrics that other ranks measured earlier in the call. This rank adds them to its own metrics.
        """
        run = self._new_run(first.call, first.epoch_idx, first.num_requested)
        run.count(part.metrics for part in parts)
        run.take_over(first)
        self._run = run

    def _new_run(self, call: int, epoch_idx: int, num_steps: int | None) -> EpochRun:
        meters = self._hosted.operator._raysgd.new_meters()
        return EpochRun(epoch_idx, num_steps, meters, RankRows(self._name), call=call)

    def _settle_run(self, present: Collection[str] | None, left: Iterable[RunState]) -> None:
        """Keep the metrics of ranks that are missing from the new group of workers in which the call continues.

        Args:
            present: Names of the ranks in the new group, or None if they are unknown. Ranks that are not among them
                count as lost.
            left: Progress and metrics of the ranks that left the group as planned, without a failure.
        """
        run = self._run
        if run is not None:
            run.settle(present)
            run.rows.lost.update((each.name, each.metrics) for each in left)

    # ------------------------------------------------------------------------------------ validation and prediction

    def validate(self, request: EpochRequest, share: Any = None) -> EpochAnswer:
        """Run the operator's `validate` once.

        Args:
            request: The driver's request to validate.
            share: See `train_epoch`.
        """
        with self._ledger.evaluating(), self._hosted.inside_epoch() if request.is_inside else nullcontext():
            return self._validate(request, share)

    def _validate(self, request: EpochRequest, share: Any) -> EpochAnswer:
        operator, loop, feed = self._hosted.operator, self._hosted.loop, self._hosted.feed
        options = loop.validation_options(request)
        self._set_timers(request.profile)
        feed.take_share("validation", request, share)
        if feed.ray_loader("validation") is not None:
            # With Ray Data, all ranks must start from the beginning of the data together.
            request = replace(request, starts_over=True)
        forget(operator._raysgd)
        with (
            self._hosted.evaluating(),
            feed.validating(request) as stream,
            around_batches(operator, "validate_batch", stream.place),
        ):
            began_at = stream.num_steps_taken
            batches = stream.take(request.num_steps)
            batches = batches if request.redraw is None else redrawing(batches, request.redraw)
            if (has_left := self._has_left) is not None:
                batches = takewhile(lambda batch: not has_left(), batches)
            args, named = accepted(operator.validate, batches, info=dict(request.info), **options)
            running = RunningCall(stream, began_at, request.num_steps, request.info, "validation")
            with self._shown(running), self._timers.record("validation"):
                returned = operator.validate(*args, **named)
        answer = self._answer(returned, request, stream.num_steps_taken - began_at)
        return replace(answer, epoch_idx=max(0, feed.epoch - 1))

    def predict(self, request: PredictRequest, work: Work, share: Any = None) -> list[Any]:
        """Predict some batches of a `predict` call, which the driver sends to the workers in several rounds.

        Args:
            request: The driver's request to predict.
            work: This worker's batches in this round.
            share: This worker's shard of the data, for all rounds. None if the driver divides no data, or if this
                worker already has its shard.

        Returns:
            The output for each batch, as arrays.
        """
        hosted, operator, place = self._hosted, self._hosted.operator, PredictionPlace(request)
        running = RunningCall(place, 0, request.total, request.info, "predict")
        with self._ledger.evaluating():
            self._set_timers(profile=False)
            with self._shown(running), hosted.predicting():
                batches = hosted.to_predict(request, work, share)
                return outputs_of(operator, batches, request, place, hosted.as_array)

    # ------------------------------------------------------------------ progress, also for a second thread

    @contextmanager
    def _shown(self, running: RunningCall) -> Iterator[None]:
        """Inside the block, make the progress of this call visible to the worker's second thread."""
        self._running, self._hosted.operator._raysgd.latest_metrics = running, {}
        try:
            yield
        finally:
            self._running = None

    @property
    def _unfinished(self) -> EpochRun | None:
        """The training call that this worker has started but not finished, or None if there is no such call."""
        run = self._run
        return None if run is None or run.is_finished else run

    def heartbeat(self) -> Heartbeat:
        """Return this worker's current progress, and how its time was spent. The worker's second thread calls this."""
        run, running = self._unfinished, self._running
        if run is None:
            return self._heartbeat("between calls" if running is None else _PHASES[running.kind], -1)
        if running is None:
            return self._heartbeat("broken off", run.num_completed)
        return self._heartbeat("training", run.num_completed, self._hosted.loop.num_samples(run), self._copies.newest)

    def _heartbeat(self, phase: str, step: int, num_samples: int = 0, snapshot: int = 0) -> Heartbeat:
        epoch, loop, spent = self._hosted.feed.epoch, self._hosted.loop, self._ledger.reading()
        return Heartbeat(
            epoch,
            step,
            phase,
            num_samples,
            snapshot,
            time.monotonic(),
            loop.own_s,
            loop.ledger(),
            time=spent,
            joint_work=loop.joint_work,
        )

    def joint_work_of(self, error: BaseException) -> JointWork | None:
        """Return the record of this rank's actions in the call, such as all-reduces, that all ranks must take in order.

        Return None if `error` was not raised because ranks took different actions.
        """
        loop = self._hosted.loop
        return loop.joint_work if loop.may_be_parted(error) else None

    def progress(self) -> CallProgress | None:
        """Return the progress of the running call, or None between calls. The worker's second thread calls this."""
        running = self._running
        if running is None:
            return None
        reported = self._hosted.operator._raysgd.latest_metrics
        latest = {name: as_number(value) for name, value in reported.items() if not is_weight(name)}
        metrics = {name: number for name, number in latest.items() if number is not None}
        total, source = running.num_steps, running.stream.source
        return CallProgress(
            num_steps=running.stream.num_steps_taken - running.began_at,
            total=source.num_steps() if total is None and source is not None else total,
            epoch_idx=running.info.get("epoch_idx", max(0, self._hosted.feed.epoch - 1)),
            num_epochs=running.info.get("num_epochs"),
            loss=metrics.get("train_loss" if running.kind == "train" else "val_loss"),
            kind=running.kind,
            metrics=metrics,
        )
