"""The calls of one replica, each up to its answer: `train`, across losses; and `validate` and `predict`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from raysgd._numbers.meters import NUM_SAMPLES, MetricSummary
from raysgd._numbers.timers import TimerCollection
from raysgd.engine.shared.types import HeldAtStep, ReplicaProgress
from raysgd.messages.epochs import EpochAnswer, EpochRequest, accepted
from raysgd.messages.prediction import PredictionPlace, PredictRequest, Work, outputs_of
from raysgd.worker.activity import Activity, RunningCall
from raysgd.worker.data.around_batch import around_batches, completing, forget, take_outside
from raysgd.worker.data.batch_streams import WatchedBatches, redrawing
from raysgd.worker.data.epoch_run import BatchSupply, EpochRun, Gate, HeldAtBoundary, RunState
from raysgd.worker.data.loop import Loop
from raysgd.worker.data.rank_rows import RankRows
from raysgd.worker.hosted import Hosted
from raysgd.worker.ledger import Ledger
from raysgd.worker.state.replica_state import StateCopies


class CallAnswers:
    """Makes the answers of a replica. It keeps the operator's timers, which run in calls that ask for a profile."""

    def __init__(self) -> None:
        self._timers = TimerCollection()

    def set_timers(self, operator: Any, profile: bool) -> None:
        """Gets the timers ready for a call."""
        if profile:
            self._timers.reset()
            self._timers.enable()
        else:
            self._timers.disable()
        operator.timers = self._timers

    def timed(self, name: str) -> AbstractContextManager[Any]:
        """Measures the body."""
        return self._timers.record(name)

    def answer(
        self,
        operator: Any,
        returned: Any,
        request: EpochRequest,
        num_steps: int,
        plain: Callable[[Any], Any],
        extra: Mapping[str, Any] | None = None,
    ) -> EpochAnswer:
        """The answer to a call.

        Args:
            operator: What it ran on.
            returned: What the operator's method returned. What is no mapping travels as it is.
            request: What was asked.
            num_steps: How many steps were taken.
            plain: Makes something that the driver can read of a result.
            extra: What the library adds to the metrics.
        """
        if not isinstance(returned, Mapping):
            return EpochAnswer(None, returned, num_steps)
        together = {**take_outside(operator._raysgd), **returned}
        values = {**(extra or {}), **{name: plain(value) for name, value in together.items()}}
        if request.profile:
            values["profile"] = self._timers.stats()
        behind = (returned.totals, returned.objects) if isinstance(returned, MetricSummary) else ()
        return EpochAnswer(MetricSummary(values, *behind), None, num_steps)


class Training:
    """Runs training calls, continues those that broke off or were held, and says where they can continue.

    Args:
        hosted: The operator and what belongs to it.
        activity: What the replica is doing.
        answering: Makes the answers.
        copies: Takes snapshots between two steps.
        ledger: Where the time is booked.

    Attributes:
        name: What other ranks know this one by, in whatever group.
        last_hold: The number of the last proposal to stop, and whether all agreed, as far as it was told.
    """

    def __init__(
        self, hosted: Hosted, activity: Activity, answering: CallAnswers, copies: StateCopies, ledger: Ledger
    ) -> None:
        self._hosted = hosted
        self._activity = activity
        self._answering = answering
        self._copies = copies
        self._inside = copies.inside
        self._ledger = ledger
        self.last_hold = 0, False
        self.name = uuid.uuid4().hex

    def begin_epoch(self, request: EpochRequest, share: Any) -> tuple[EpochRun, BatchSupply]:
        """Begins a call, and finds the batches for it.

        Args:
            request: What is asked.
            share: This replica's part of data that the driver divides; None if it has that already.
        """
        hosted, loop = self._hosted, self._hosted.loop
        raised = self._activity.unfinished
        if raised is not None and raised.stream is hosted.feed.train_stream is not None:
            hosted.feed.go_to(hosted.feed.epoch, hosted.feed.position())  # to the batch in which user code raised
        self._ledger.begin_call()
        loop.begin_call()
        if share is not None:
            hosted.feed.take_share("train", request, share)
        stream = loop.stream(request)
        self._answering.set_timers(hosted.operator, request.profile)
        if self._inside.every is not None:
            self._inside.clear()
        run = self._activity.run = self._new_run(loop.pass_index(stream), request.num_steps)
        run.ledger_before = loop.ledger()
        return run, stream

    def resume(self, request: EpochRequest, share: Any) -> EpochAnswer | HeldAtStep:
        """Goes on with a call that broke off or was held, wherever in the data it is by now."""
        run, loop = self._activity.run, self._hosted.loop
        if run is None:  # nothing was begun yet when it broke off
            return self.go_through(*self.begin_epoch(request, share), request)
        if run.answer is not None:
            return self._complete(run, run.answer)
        if run.is_finished:  # by another rank's account: there is nothing left but to say what was seen here
            return self._finish(run, loop.results(run), request)
        self._hosted.feed.begin_again(request, share, run.place)
        return self.go_through(run, loop.stream(request), request)

    def go_through(self, run: EpochRun, stream: BatchSupply, request: EpochRequest) -> EpochAnswer | HeldAtStep:
        """Runs the operator's `train_epoch` over these batches, once."""
        hosted, loop, feed, operator = self._hosted, self._hosted.loop, self._hosted.feed, self._hosted.operator
        internals = operator._raysgd
        callbacks = internals.callbacks
        info = {**request.info, **internals.info_of_call(request.num_steps, run.epoch_idx)}
        epoch_before, place_before = feed.epoch, internals.place
        run.attach(stream)
        stream.at_boundary = partial(self._at_boundary, loop, run, stream)
        coming = iter(()) if run.is_exhausted else stream.take(run.num_steps_left)
        coming = coming if request.redraw is None else redrawing(coming, request.redraw)
        batches = WatchedBatches(self._ledger.timing(coming), loop.step)
        began_at = stream.num_steps_taken - run.num_completed
        self._activity.running = RunningCall(stream, began_at, request.num_steps, info, "train")
        internals.meters_to_fill, internals.latest_metrics = run.meters, {}
        internals.lost = () if hosted.world.rank else tuple(run.rows.lost.values())
        forget(internals)
        around = [*internals.around_batch]
        if callbacks.are_there:
            around += callbacks.around_batch(operator, loop.step)
        is_stock = loop.completes_metrics
        if around or not is_stock:  # else the stock loop does it, where no one sees the metrics first
            around.insert(0, completing(internals, loop.step))
        given = {"info": info, "num_steps": request.num_steps, "epoch_idx": run.epoch_idx}
        internals.place = loop.step
        try:
            with ExitStack() as stack:
                stack.enter_context(self._ledger.call(loop.first_bin))
                stack.enter_context(hosted.training(run, stream))
                if around:
                    stack.enter_context(around_batches(operator, "train_batch", loop.step, around))
                if callbacks.are_there:
                    stack.enter_context(callbacks.listening(operator))
                if request.profile:
                    stack.enter_context(self._answering.timed("train_epoch"))
                if callbacks.are_there:
                    callbacks.begin_epoch(run, operator)
                loop.note_boundary()
                args, named = ([batches], given) if is_stock else accepted(operator.train_epoch, batches, **given)
                returned = operator.train_epoch(*args, **named)
                stream.settle()
        except HeldAtBoundary:
            run.gate = Gate()
            return HeldAtStep(run.num_completed, self._snapshot(run))
        except BaseException as error:  # also Ctrl-C: the next call begins at a boundary
            is_alone = not hosted.world.is_distributed
            if loop.can_return and (is_alone or not loop.is_lost(error)):
                loop.return_to_boundary()
            elif is_alone and stream is feed.train_stream:  # its optimizer stepped, so the batch counts
                stream.settle()
            raise
        finally:
            self._activity.running = internals.meters_to_fill = stream.at_boundary = None
            internals.place = place_before
        if not batches.was_touched and feed.epoch == epoch_before:
            feed.begin_pass()  # one that brought its own data
        return self._finish(run, returned, request, place=feed.place_of_call(stream))

    def _finish(self, run: EpochRun, returned: Any, request: EpochRequest, place: Any = None) -> EpochAnswer:
        operator, loop = self._hosted.operator, self._hosted.loop
        callbacks = operator._raysgd.callbacks
        returned = callbacks.end_epoch(operator, returned) if callbacks.are_there else returned
        extra = loop.extra_results()
        extra = {**extra, "timings": self._ledger.of_call()} if request.profile else extra
        answer = self._answering.answer(operator, returned, request, run.num_completed, loop.plain, extra)
        told = answer.metrics.get(NUM_SAMPLES) if answer.metrics is not None else None
        num_samples = int(told) if isinstance(told, int | float) else loop.num_samples(run)
        heartbeat = self._activity.last_heartbeat(num_samples)
        before, after = run.ledger_before, heartbeat.data
        num_used = after.used_since(before) if before and after else 0
        beside = {"heartbeat": heartbeat, "place": place, "joint_work": loop.joint_work, "num_used": num_used}
        beside["weight_sums"] = self._hosted.weight_sums() if request.compares_ranks else None
        answer = replace(answer, epoch_idx=run.epoch_idx, **beside)
        run.finish(answer)
        loop.end_call()
        self._ledger.end_call()
        return self._complete(run, answer)

    def _complete(self, run: EpochRun, answer: EpochAnswer) -> EpochAnswer:
        """The answer with what ranks had measured that are gone; the first rank counts that."""
        return answer if self._hosted.world.rank or not run.rows.lost else run.with_lost(answer)

    def _at_boundary(self, loop: Loop, run: EpochRun, stream: BatchSupply) -> None:
        """Between two steps: takes a snapshot if one is due, and stops if that was agreed on."""
        loop.note_boundary()
        if run.meters.has_objects:
            run.meters.note_boundary()
        self._ledger.commit()
        is_due = self._inside.every is not None and self._inside.is_due(run.num_completed)
        if not (is_due or run.gate.proposed is not None):
            return
        if not loop.can_resume(stream) or self._hosted.epoch_obstacle is not None:
            return
        if is_due:
            self._inside.keep(run.num_completed, self._snapshot(run))
        if run.gate.proposed is not None and run.gate.stops(run.num_completed):
            raise HeldAtBoundary

    def _snapshot(self, run: EpochRun) -> Any:
        self._note_place(run)
        return self._copies.inside_call(self._hosted.state, self._hosted.world.rank, run)

    def progress(self) -> ReplicaProgress:
        """Returns how far the call is that broke off or was held, or the last one that was completed."""
        hosted, loop, run = self._hosted, self._hosted.loop, self._activity.run
        obstacle = hosted.group_obstacle
        if run is None or run.is_finished:
            num_steps = run.num_completed + 1 if run is not None else 0
            return ReplicaProgress(num_steps, loop.is_whole, obstacle or loop.order_obstacle)
        obstacle = obstacle or hosted.epoch_obstacle or loop.order_obstacle
        obstacle = obstacle or hosted.feed.obstacle_of_call(run.stream)
        words, growth = loop.progress_text(), hosted.growth
        return ReplicaProgress(run.num_completed, loop.is_whole, obstacle, words, growth=growth)

    def propose_hold(self, number: int, margin: int, at: int | None) -> int | None:
        """Asks to stop between two steps, from a second thread; see `RegroupingReplica`."""
        run = self._activity.unfinished
        if number <= self.last_hold[0]:  # it would be settled by now, and the training would wait at it
            return None
        self.last_hold = number, False
        hosted = self._hosted
        if run is None or self._activity.running is None or hosted.epoch_obstacle is not None:
            return None
        if hosted.feed.obstacle_of_call(run.stream) is not None:
            return None
        step = run.num_completed + margin if at is None else at
        return step if run.gate.propose(step, lambda: run.num_completed) else None

    def settle_hold(self, number: int, is_agreed: bool) -> None:
        """Says what became of the proposal."""
        if self._activity.run is not None and number == self.last_hold[0]:
            self.last_hold = number, is_agreed
            self._activity.run.gate.settle(is_agreed)

    def leave_group(self) -> None:
        """Goes back to the last boundary, and leaves the stream there: it will be another one, or at another place."""
        loop, run = self._hosted.loop, self._activity.unfinished
        loop.break_off()
        self._inside.clear()
        if run is not None:
            if loop.is_whole:  # else the state of another rank follows
                loop.return_to_boundary()
            self._note_place(run)
            run.detach()

    def _note_place(self, run: EpochRun) -> None:
        if run.stream is not None:
            run.place = self._hosted.feed.place_of_call(run.stream)

    def state(self) -> RunState | None:
        """Returns where the call is, for ranks that take it over."""
        run = self._activity.run
        return None if run is None else run.state(with_metrics=False)

    def take_over(self, state: Mapping[str, Any], run: RunState | None) -> None:
        """Goes on from the state of another rank, and from where it is."""
        self._hosted.restore(state, None)
        if run is None:
            self._activity.run = None
            return
        self._activity.run = self._activity.run or self._run_like(run)
        self._activity.run.take_over(run)

    def go_on_from(self, first: RunState, parts: Iterable[RunState]) -> None:
        """Gets ready to continue a call of which a snapshot was taken, with what these ranks had measured."""
        run = self._run_like(first)
        run.count(part.metrics for part in parts)
        run.take_over(first)
        self._activity.run = run

    def _run_like(self, state: RunState) -> EpochRun:
        return self._new_run(state.epoch_idx, state.num_requested)

    def _new_run(self, epoch_idx: int, num_steps: int | None) -> EpochRun:
        return EpochRun(epoch_idx, num_steps, self._hosted.operator._raysgd.new_meters(), RankRows(self.name))

    def settle(self, present: Collection[str] | None, left: Iterable[RunState]) -> None:
        """Goes on in another group.

        Args:
            present: Its ranks, all others are gone; None where that is not known.
            left: How far those were that left in an orderly way.
        """
        run = self._activity.run
        if run is not None:
            run.settle(present)
            run.rows.lost.update((each.name, each.metrics) for each in left)

    def forget(self) -> None:
        """Forgets the call: the state is another one."""
        self._activity.running = self._activity.run = None
        self._inside.clear()


class Evaluation:
    """Validates and predicts.

    Args:
        hosted: The operator and what belongs to it.
        activity: What the replica is doing.
        answering: Makes the answers.
        ledger: Where the time is booked.

    Attributes:
        has_left: Whether no more batches are to be validated; None where nothing says so.
    """

    has_left: Callable[[], bool] | None = None

    def __init__(self, hosted: Hosted, activity: Activity, answering: CallAnswers, ledger: Ledger) -> None:
        self._hosted = hosted
        self._activity = activity
        self._answering = answering
        self._ledger = ledger

    def validate(self, request: EpochRequest, share: Any) -> EpochAnswer:
        """Runs the operator's `validate` once.

        Args:
            request: What is asked.
            share: This replica's part of data that the driver divides; None if it has that already.
        """
        with self._ledger.evaluating():
            return self._validate(request, share)

    def _validate(self, request: EpochRequest, share: Any) -> EpochAnswer:
        operator, loop, feed = self._hosted.operator, self._hosted.loop, self._hosted.feed
        options = loop.validation_options(request)
        self._answering.set_timers(operator, request.profile)
        feed.take_share("validation", request, share)
        if feed.ray_loader("validation") is not None:  # all ranks have to begin a pass together
            request = replace(request, starts_over=True)
        forget(operator._raysgd)
        with (
            self._hosted.evaluating(),
            feed.validation.stream(request) as stream,
            around_batches(operator, "validate_batch", stream.place, [completing(operator._raysgd, stream.place)]),
        ):
            began_at = stream.num_steps_taken
            self._activity.running = RunningCall(stream, began_at, request.num_steps, request.info, "validation")
            operator._raysgd.latest_metrics = {}
            try:
                batches = stream.take(request.num_steps)
                batches = batches if request.redraw is None else redrawing(batches, request.redraw)
                if (has_left := self.has_left) is not None:
                    batches = takewhile(lambda batch: not has_left(), batches)
                args, named = accepted(operator.validate, batches, info=dict(request.info), **options)
                with self._answering.timed("validation"):
                    returned = operator.validate(*args, **named)
            finally:
                self._activity.running = None
        num_steps = stream.num_steps_taken - began_at
        answer = self._answering.answer(operator, returned, request, num_steps, loop.plain)
        return replace(answer, epoch_idx=max(0, feed.epoch - 1))

    def predict(self, request: PredictRequest, work: Work, share: Any) -> list[Any]:
        """Takes part in a round.

        Args:
            request: What is asked.
            work: This replica's batches.
            share: What it needs for the whole prediction; None if nothing, or if it has that already.

        Returns:
            The output for each batch, as arrays.
        """
        hosted, operator, place = self._hosted, self._hosted.operator, PredictionPlace(request)
        with self._ledger.evaluating():
            self._answering.set_timers(operator, profile=False)
            self._activity.running = RunningCall(place, 0, request.total, request.info, "predict")
            operator._raysgd.latest_metrics = {}
            try:
                with hosted.predicting():
                    batches = hosted.to_predict(request, work, share)
                    return outputs_of(operator, batches, request, place, hosted.as_array)
            finally:
                self._activity.running = None
