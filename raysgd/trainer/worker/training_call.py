"""`TrainingCall`: one `train` call on one worker, from its first step to its answer.

After workers are lost, the call continues in the surviving workers. Each new call gets a new `TrainingCall`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import HeldAtStep
from raysgd.core.numbers.metric_meters import NUM_SAMPLES
from raysgd.core.numbers.results import ProgressKind
from raysgd.core.numbers.time_spent import DRIVER
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest, accepted
from raysgd.trainer.worker.data.around_batch import around_batches, forget
from raysgd.trainer.worker.data.batch_streams import WatchedBatches, redrawing
from raysgd.trainer.worker.data.epoch_run import EpochRun, Gate, HeldAtBoundary, RunState
from raysgd.trainer.worker.data.rank_rows import RankRows
from raysgd.trainer.worker.hosted import HostedOperator
from raysgd.trainer.worker.operator import is_stock
from raysgd.trainer.worker.state.copies import StateCopies


class TrainingCall(EpochRun):
    """A `train` call on this worker. It runs the operator's `train_epoch`, and runs it again after an interruption.

    A call that was interrupted by a failure, or paused, continues after its last completed step. A finished call is
    kept until the next one begins, because another rank may not have finished it.

    Args:
        hosted: The operator to train.
        copies: Takes the snapshots inside the call.
        begun: Says which call this is, in which epoch it starts, and how many steps it takes. The number of completed
            steps in `begun` is ignored. To continue after these steps, call `take_over`.

    Attributes:
        info: The `info` dictionary that is passed to the operator's `train_epoch`. Set before `train_epoch` starts.
        is_running: True while `train_epoch` runs. A second thread of the worker reads this attribute.
    """

    kind: ProgressKind = "train"
    info: Mapping[str, Any]
    is_running = False

    def __init__(self, hosted: HostedOperator, copies: StateCopies, begun: RunState) -> None:
        meters = hosted.operator._raysgd.new_meters()
        super().__init__(begun.epoch_idx, begun.num_requested, meters, RankRows(hosted.name), call=begun.call)
        self._hosted, self._copies = hosted, copies

    def resume(self, request: EpochRequest, share: Any) -> EpochAnswer | HeldAtStep:
        """Continue the call from the step after its last completed step, or return its answer if it is finished.

        Args:
            request: The request of this call.
            share: Data that the driver sends to this worker: a whole dataset, or this worker's new shard of it. None if
                the driver sends no data.

        Returns:
            This rank's answer to the driver, or a `HeldAtStep` if the call stopped between two steps.
        """
        loop = self._hosted.loop
        if self.answer is not None:
            return self.with_lost(self.answer, self._hosted.world.rank)
        if self.is_finished:  # another rank finished the call: only report this rank's metrics
            return self._end(loop.results(self), request)
        if request.hold_at is not None and self.num_completed >= request.hold_at:
            # All ranks had stopped here, as planned, but one of them was lost before the driver had all answers.
            return HeldAtStep(self.num_completed, self.snapshot(), is_planned=True)
        self._hosted.feed.begin_again(request, share, self.place)
        return self.train_on(loop.stream(request, is_begun=True), request)

    def train_on(self, stream: Any, request: EpochRequest) -> EpochAnswer | HeldAtStep:
        """Run the operator's `train_epoch` on the remaining batches of the call.

        Args:
            stream: Stream from which the batches come.
            request: The driver's request to train.

        Returns:
            See `resume`.
        """
        hosted, loop, feed, operator = self._hosted, self._hosted.loop, self._hosted.feed, self._hosted.operator
        internals = operator._raysgd
        callbacks = internals.callbacks
        self.info = {**request.info, **internals.info_of_call(request.num_steps, self.epoch_idx)}
        epoch_before, leg_before, taken_before = feed.epoch, internals.leg, stream.num_steps_taken
        self.attach(stream)
        if request.hold_at is not None and request.hold_at > self.num_completed:
            self.gate = Gate(request.hold_at)
        stream.at_boundary = self._at_boundary
        # `take` is a generator: it reads `stream.leg` when the first batch is drawn. `hosted.training` sets it before.
        coming = iter(()) if self.is_exhausted else stream.take(self.num_steps_left)
        coming = coming if request.redraw is None else redrawing(coming, request.redraw)
        batches = WatchedBatches(hosted.ledger.timing(coming), stream)
        internals.meters_to_fill = self.meters
        internals.lost = () if hosted.world.rank else tuple(self.rows.lost.values())
        forget(internals)
        has_stock_loop = loop.has_stock_loop
        given = {"info": self.info, "num_steps": request.num_steps, "epoch_idx": self.epoch_idx}
        try:
            with ExitStack() as stack:
                self.is_running, internals.latest_metrics = True, {}
                stack.callback(setattr, self, "is_running", False)
                stack.enter_context(hosted.ledger.call(loop.first_bin))
                stack.enter_context(hosted.training(self, stream))
                leg = internals.leg = loop.leg
                after = callbacks.after_batch(operator, leg) if callbacks.are_there else None
                # The library's own `train_epoch` completes each batch's metrics. The user's `train_epoch` does not.
                if after is not None or not has_stock_loop:
                    stack.enter_context(around_batches(operator, "train_batch", leg, after))
                if request.profile:
                    stack.enter_context(hosted.timers.record("train_epoch"))
                if callbacks.are_there:
                    stack.enter_context(callbacks.listening(operator))
                    callbacks.begin_epoch(self, operator)
                    callbacks.begin_leg(operator, partial(self._where, stream, request))
                loop.note_boundary()
                args, named = ([batches], given) if has_stock_loop else accepted(operator.train_epoch, batches, **given)
                returned = operator.train_epoch(*args, **named)
                # A `break` may leave accumulated gradients. Step with them before their batches count as used.
                loop.end_leg(stream.num_steps_taken - taken_before)
                stream.confirm_step()
                self._commit()
        except HeldAtBoundary:
            is_planned, self.gate = self.gate.is_planned(self.num_completed), Gate()
            return HeldAtStep(self.num_completed, self.snapshot(), is_planned)
        except BaseException as error:  # also on Ctrl-C, because the next call must begin after a completed step
            is_alone = not hosted.world.is_distributed
            if loop.can_return and (is_alone or not loop.is_lost(error)):
                loop.return_to_boundary()
            elif is_alone and stream is feed.train_stream:
                stream.confirm_step()  # the optimizer has already stepped on the batch, so count the batch as used
            raise
        finally:
            internals.meters_to_fill = stream.at_boundary = None
            internals.leg = leg_before
        if not batches.was_touched and feed.epoch == epoch_before:
            feed.begin_pass()  # the user's `train_epoch` has used other data, so nothing has counted this epoch yet
        return self._end(returned, request, place=feed.place_of_call(stream))

    def _where(self, stream: Any, request: EpochRequest) -> dict[str, Any]:
        """Return the position in the training data from which this group of workers continues the epoch, as plain data.

        The returned dict goes into the run's journal. `raysgd.replay` uses it to find the samples of each step.
        """
        hosted, operator, feed = self._hosted, self._hosted.operator, self._hosted.feed
        is_begun, leg = stream.is_mid_pass, cast("Any", hosted.loop.leg)
        consumed = stream.completed if is_begun else 0
        own = None if is_stock(operator, "train_epoch") else f"`{type(operator).__name__}` overrides"
        return {
            "step": operator.global_step,
            "pass": stream.pass_index if is_begun else hosted.loop.pass_index(stream),
            "consumed": consumed,
            "num_workers": hosted.world.size,
            "attempt": [request.call, request.attempt],
            "window": leg.rules.num_batches,
            "is_of_call": stream is not feed.train_stream,
            "data": stream.source.layout(consumed, is_begun),
            "obstacle": own and f"{own} `train_epoch`, which takes the steps itself",
        }

    def _commit(self) -> None:
        """Finish a step that all ranks have completed: add its metrics to the metrics of the epoch."""
        self._hosted.loop.note_boundary()
        self.meters.count_pending()
        if self.meters.has_objects:
            self.meters.note_boundary()
        self._hosted.ledger.commit()

    def _at_boundary(self) -> None:
        """Finish a step, and prepare for the next one.

        If a snapshot is due and the call could continue from it, copy the training state.

        Raises:
            HeldAtBoundary: All ranks have agreed to stop after this step.
        """
        hosted, loop = self._hosted, self._hosted.loop
        self._commit()
        is_due = self._copies.every is not None and self._copies.is_due(self.num_completed)
        is_asked = self.gate.proposed is not None or self.gate.planned is not None
        if not (is_due or is_asked):
            return
        if not loop.can_resume(self.stream) or hosted.epoch_obstacle is not None:
            return
        if is_due:
            self._copies.keep(self.num_completed, self.snapshot())
        if is_asked and self.gate.stops(self.num_completed):
            raise HeldAtBoundary

    @property
    def can_move(self) -> bool:
        """True if the call can continue after its last completed step in another group, or in another process."""
        hosted = self._hosted
        return hosted.epoch_obstacle is None and hosted.feed.obstacle_of_call(self.stream) is None

    def snapshot(self) -> Capture:
        """Copy the training state after the last completed step, and return this rank's part of the snapshot.

        The part includes the progress and the metrics of the call.
        """
        self._note_place()
        return self._copies.inside_call(self._hosted.state, self._hosted.world.rank, self.state(with_metrics=True))

    def suspend(self) -> None:
        """Undo the step that was interrupted, and detach the call from its stream, before it continues in a new group.

        The new group divides the remaining data again.
        """
        if self._hosted.loop.is_whole:  # if not, this rank will receive the training state of another rank
            self._hosted.loop.return_to_boundary()
        self._note_place()
        self.detach()

    def _note_place(self) -> None:
        if self.stream is not None:
            self.place = self._hosted.feed.place_of_call(self.stream)

    def _end(self, returned: Any, request: EpochRequest, place: Any = None) -> EpochAnswer:
        """Finish the call with what `train_epoch` returned, and return this rank's answer to the driver."""
        hosted, loop, callbacks = self._hosted, self._hosted.loop, self._hosted.operator._raysgd.callbacks
        returned = callbacks.end_epoch(hosted.operator, returned) if callbacks.are_there else returned
        extra = loop.extra_results()
        extra = {**extra, "timings": hosted.ledger.of_call()} if request.profile else extra
        answer = hosted.answer(returned, request, self.num_completed, extra)
        told = answer.metrics.get(NUM_SAMPLES) if answer.metrics is not None else None
        num_samples = int(told) if isinstance(told, int | float) and math.isfinite(told) else loop.num_samples(self)
        heartbeat = hosted.heartbeat("between calls", num_samples=num_samples)
        before, after = self.samples_before, heartbeat.data
        num_used = after.used_since(before) if before and after else 0
        answer = replace(
            answer,
            epoch_idx=self.epoch_idx,
            call=self.call,
            heartbeat=heartbeat,
            place=place,
            joint_work=loop.joint_work,
            num_used=num_used,
            weight_sums=hosted.weight_sums() if request.compares_ranks else None,
        )
        self.answer, self.is_finished = answer, True
        loop.end_call()
        hosted.ledger.enter(DRIVER)
        return self.with_lost(answer, hosted.world.rank)
