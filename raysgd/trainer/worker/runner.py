"""`ClassRunner`: the object in each worker that holds the training operator and runs the driver's calls.

The driver sends functions that call its methods. The work is split over modules: `hosted` connects the operator with
its framework, `training_call` runs a training call, and `replica_state` copies the training state. ADR 115 explains the
split.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from raysgd.core.engine.shared.interface import Capture, taken_over
from raysgd.core.engine.shared.types import Heartbeat, HeldAtStep, ReplicaProgress, StateHandover, World
from raysgd.core.numbers.meters import MetricSummary, is_weight
from raysgd.core.numbers.results import CallProgress, ProgressKind, as_number
from raysgd.core.numbers.timing import DRIVER
from raysgd.exceptions import NotRegisteredError
from raysgd.trainer.messages.comparison import JointWork
from raysgd.trainer.messages.epochs import BegunEpoch, EpochAnswer, EpochRequest, RunnerFacts, accepted
from raysgd.trainer.messages.prediction import PredictRequest, Work, outputs_of
from raysgd.trainer.worker.hosted import HostedOperator
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.operator import around_batches
from raysgd.trainer.worker.replica_state import StateCopies, check_parts
from raysgd.trainer.worker.step_loop import StepLoop
from raysgd.trainer.worker.training_call import RunState, TrainingCall, run_of

logger = logging.getLogger(__name__)

_PHASES = {"train": "training", "validation": "validating", "test": "testing", "predict": "predicting"}


@dataclass(frozen=True)
class EvaluationCall:
    """The `validate` or `predict` call that a worker is running at the moment.

    Attributes:
        cursor: Object that supplies the call's batches. Its `num_batches_taken` counts the batches taken so far. For
            `predict`, an object with the same attributes, which estimates the batches of all workers.
        began_at: The cursor's `num_batches_taken` when the call began.
        num_batches: Number of global batches to use, or None to use all remaining batches.
        info: The `info` dictionary that is passed to the operator's method.
        kind: What the call does: validate, test or predict.
    """

    cursor: Any
    began_at: int
    num_batches: int | None
    info: Mapping[str, Any]
    kind: ProgressKind


class ClassRunner(ABC):
    """The object in a worker that holds the current training operator, runs the driver's calls, and reports progress.

    A training call that was interrupted by a failure, or paused, continues after its last completed step. This class
    implements the engine's interface `RegroupingReplica`. Each framework has a subclass.

    Args:
        settings: Settings with which to create the operator.
        world: This worker's rank and the number of workers in its group.
    """

    _hosted: HostedOperator
    _candidate: HostedOperator | None = None
    _training: TrainingCall | None = None  # the current or last training call
    _evaluation: EvaluationCall | None = None  # the running call to `validate` or `predict`
    # On a spare worker that validates: returns True if the validation must end early. None on all other workers.
    _has_left: Callable[[], bool] | None = None

    def __init__(self, settings: Any, world: World) -> None:
        self._ledger, self._last_left = Ledger(), 0
        self._copies = StateCopies(settings.recovery.snapshot_every_n_steps, self._ledger)
        self._settings, self._first_world = settings, world
        self._host(self._make_hosted(settings.after(0), world))

    def _host(self, hosted: HostedOperator) -> None:
        """Use this new operator, which has not run any call yet, for all later calls."""
        self._hosted = hosted
        self._forget_call()
        self._last_hold = 0, False  # number of the last proposal to stop, and whether all ranks have agreed to it

    def _forget_call(self) -> None:
        """Discard what is known about the last training call, for example after other training state was loaded."""
        self._training = None
        self._copies.forget_call()

    @abstractmethod
    def _make_hosted(self, settings: Any, world: World) -> HostedOperator:
        """Return a `HostedOperator` of this framework for these settings, without creating its operator yet."""

    def setup(self) -> Any:
        """Create the operator, which runs the user's `setup`, and apply later changes of the config.

        Return the facts about the operator that the driver needs, a `RunnerFacts`.

        Raises:
            NotRegisteredError: `setup` did not register a model.
        """
        facts = self._hosted.build()
        if not facts.num_models:
            raise NotRegisteredError(
                f"`{type(self._hosted.operator).__name__}.setup` never called `register`: register models and "
                "optimizers there, so that the library can train, save and restore them."
            )
        if self._settings.config_changes:
            self._hosted.follow(self._settings)
            facts = self._hosted.facts()
        self._ledger.enter(DRIVER)
        return facts

    def renew(self, settings: Any, world: World | None = None) -> Any:
        """Replace the operator by a new one that is created from new settings, in the same process and group.

        Return the facts about the new operator that the driver needs, as `setup` does.

        Args:
            settings: The new settings.
            world: This worker's rank and the number of workers. Default: as before.
        """
        self.shutdown()
        self.drop_reload()
        self._settings = settings
        self._host(self._make_hosted(settings.after(0), world or self._hosted.world))
        return self.setup()

    def follow(self, settings: Any) -> None:
        """Apply the config and the worker callbacks of newer settings to the operator. See `HostedOperator.follow`."""
        self._hosted.follow(settings)

    def warm_up(self) -> None:
        """Train on a batch or two before this worker joins a group, so that its first step in the group is fast."""
        self._ledger.stand_by()
        try:
            self._hosted.warm_up()
        except Exception as error:  # only log the error, because a step in the group will raise it again
            logger.warning("warm-up of a new worker failed: %r", error)

    @property
    def epoch(self) -> int:
        """Number of passes over the training data that this worker has started."""
        return self._hosted.feed.epoch

    @property
    def epochs_done(self) -> int:
        """Number of passes over the training data that this worker has completed."""
        feed = self._hosted.feed
        position = feed.position()
        is_mid_pass = position is not None and (position.get("is_mid_pass") or position.get("is_unknown"))
        return feed.epoch - bool(is_mid_pass)

    def change_config(self, settings: Any) -> list[str]:
        """Change entries of the operator's config. See `HostedOperator.change_config`."""
        return self._hosted.change_config(settings)

    # The following methods implement `reload`: they replace the operator with an instance of the edited class that has
    # the same state. ADR 72 explains why this takes two steps.

    def prepare_reload(self, settings: Any) -> tuple[RunnerFacts, Any]:
        """Create an operator of the user's edited class, and load the current training state into it.

        The old operator stays in use until `finish_reload`.

        Args:
            settings: Settings with the edited class.

        Returns:
            The facts about the new operator that the driver needs, and the hyperparameters that its `setup` sets to
            other values than the old operator's `setup`.

        Raises:
            ValueError: The training state does not match the new operator.
        """
        hosted = self._hosted
        self._candidate, own = None, hosted.state.own()
        with hosted.giving_back_random_numbers():
            candidate = self._make_hosted(settings, hosted.world)
            facts = candidate.build()
            state = hosted.state.read()
            check_parts(state, facts.counts)
            candidate.restore(state, own)
        candidate.has_trained = hosted.has_trained
        self._candidate = candidate
        return facts, hosted.edited_by(candidate)

    def finish_reload(self, revision: int, edited: Any) -> RunnerFacts | None:
        """Switch to the operator that `prepare_reload` created. Return the facts about it that the driver needs.

        Return None if this worker has neither the edited class nor an operator that `prepare_reload` created from it.

        Args:
            revision: The `revision` of the settings with the edited class.
            edited: The hyperparameters that the edited class sets to other values.
        """
        if self._hosted.settings.revision != revision:  # if equal, this worker already has the edited class
            candidate = self._candidate
            if candidate is None or candidate.settings.revision != revision:
                return None
            self._hosted.feed.close()
            self._host(candidate)
            self.drop_reload()
        self._hosted.take_edited(edited)
        return self._hosted.facts()

    def drop_reload(self) -> None:
        """Discard the operator that `prepare_reload` created."""
        self._candidate = None

    def follow_config(self) -> None:
        """Set the hyperparameters of the optimizers back to the values that `setup` chose.

        With PyTorch, learning rates that follow `lr` in the config are set to their values after its latest change.
        Called after the state of a trainer with another config was loaded.
        """
        self._hosted.take_edited(self._hosted.operator._raysgd.chosen)

    # ------------------------------------------------------------------------------------------------ the state

    def state(self) -> dict[str, Any]:
        """Return the training state without copying it. Callers must copy the state before they run anything else."""
        return self._hosted.state.read()

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the training state between two calls, and return this rank's part of the snapshot.

        Rank 0 copies the state that all ranks share. If this state is sharded over the ranks, every rank copies its
        shard instead. In addition, every rank copies the state that only it has.

        Args:
            landed_token: Token of the last copy that has arrived in the driver, or None if no copy has.
        """
        return self._copies.after_call(self._hosted.state, self._hosted.world.rank, landed_token)

    def fetch(self, token: int) -> Any:
        """Return the copy of the training state that this token identifies. A second thread calls this method."""
        return self._copies.fetch(token)

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of the snapshot that was taken after `number` steps of the running call.

        Return None if this rank has discarded its part, or the copy of the state to which the part refers.
        """
        return self._copies.part_of_snapshot(number)

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Load the training state of a snapshot or a checkpoint. See `ReplicaState.restore`.

        Args:
            shared_state: The state that all ranks share.
            own_state: The state that only this rank has. None to leave that state unchanged.
        """
        self._hosted.restore(shared_state, own_state)
        self._forget_call()

    def restore_inside(
        self,
        shared_state: Any,
        own_state: Any,
        first: RunState,
        parts: Sequence[RunState],
        everyones: Sequence[RunState],
    ) -> None:
        """Load a snapshot that was taken inside a training call, so that the call can continue from there.

        Args:
            shared_state: The state that all ranks share.
            own_state: The state that only this rank has. None to leave that state unchanged.
            first: Progress of the call on rank 0 when the snapshot was taken.
            parts: Progress of those old ranks whose metrics this rank adds to its own.
            everyones: Progress of every old rank, without metric objects.
        """
        self.restore(shared_state, own_state)
        self._go_on_from(first, *([each.metrics or MetricSummary() for each in some] for some in (parts, everyones)))

    def shutdown(self) -> None:
        """Drop the iterators over data, which ends the worker processes of data loaders. The operator stays usable."""
        self._hosted.close()
        self._forget_call()
        self._copies.clear()

    # ------------------------------------------------------------------------------------ training

    def train_epoch(self, request: EpochRequest, share: Any = None) -> EpochAnswer | HeldAtStep:
        """Run the operator's `train_epoch` from the start of the requested call.

        If the request names an epoch that an earlier run left unfinished, possibly in another process, continue that
        epoch. This worker then already has the training state of the step at which the earlier run stopped.

        Args:
            request: The driver's request to train.
            share: Data that the driver sends to this worker: a whole dataset, or this worker's shard of it. None if the
                driver sends no data, for example because this worker already has it.

        Returns:
            This worker's answer to the driver, or a `HeldAtStep` if the call stopped between two steps.
        """
        hosted, feed, before, begun = self._hosted, self._hosted.feed, self._unfinished, request.begun
        if begun is not None and not (begun.is_exhausted or feed.training(request).is_mid_pass):
            begun = None  # the user has meanwhile registered other data, which has no position to continue from
        if begun is None:
            self._training = None  # until the new call exists: if an error occurs before, there is nothing to resume
            if before is not None and before.cursor is feed.train_cursor is not None:
                # The user's code raised an error in the last call. Train again on the batch in which it occurred.
                feed.go_to(feed.epoch, feed.position())
        self._ledger.begin_call()
        hosted.parts.begin_call()
        hosted.set_timers(request.profile)
        if begun is not None:
            return self._call_left(begun, request, before).resume(request, share)
        if share is not None:
            feed.take_share("train", request, share)
        cursor = feed.training(request)
        if self._copies.every is not None:
            self._copies.forget_call()
        first = RunState(0, feed.pass_index(cursor), request.num_steps, call_number=request.call_number)
        call = self._training = TrainingCall(hosted, self._copies, first)
        call.samples_before = feed.samples_used()
        return call.train_on(cursor, request)

    def _call_left(self, begun: BegunEpoch, request: EpochRequest, before: TrainingCall | None) -> TrainingCall:
        """Return the call that continues an epoch which an earlier run left unfinished.

        Args:
            begun: The step at which the earlier run left the epoch, and the metrics of that run's ranks.
            request: The driver's request to train.
            before: The last call on this worker, if it is unfinished.
        """
        at, world = (begun.num_steps, begun.epoch_idx), self._hosted.world
        if before is not None and (before.num_batches_completed, before.progress.epoch_idx) == at:
            before.detach()  # the earlier run used this same process, which still holds the epoch's metric objects
            before.note(call_number=request.call_number)
            return before
        for name in begun.objects:
            logger.warning("the metric object `%s` will cover only what follows in this epoch", name)
        lost = {str(number): metrics for number, metrics in enumerate(begun.lost)}
        first = RunState(*at, request.num_steps, begun.is_exhausted, lost=lost, call_number=request.call_number)
        return self._go_on_from(first, taken_over(begun.by_rank, world.rank, world.size), begun.by_rank)

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

        If there is no such call, return the position after the last completed training call, or 0 before any call.
        """
        self._ledger.note_recovery()
        hosted, feed, call = self._hosted, self._hosted.feed, self._training
        obstacle, can_be_source = hosted.group_obstacle, hosted.parts.can_be_source
        if call is None or call.progress.is_finished:
            position = call.num_batches_completed + 1 if call is not None else 0
            return ReplicaProgress(position, can_be_source, obstacle or feed.order_obstacle)
        obstacle = obstacle or hosted.epoch_obstacle or feed.order_obstacle or feed.obstacle_of_call(call.cursor)
        return ReplicaProgress(call.num_batches_completed, can_be_source, obstacle, feed.progress_text())

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
        step = call.num_batches_completed + margin if at is None else at
        return step if call.gate.propose(step, lambda: call.num_batches_completed) else None

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

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue in a new group of workers. Return the facts about the operator that the driver needs.

        Args:
            world: This worker's rank in the new group, and the number of workers.
            handover: Says which rank sends its training state to which other ranks.
        """
        hosted = self._hosted
        with self._ledger.regrouping(goes_on=lambda: self._unfinished is not None):
            hosted.feed.break_off()
            self._copies.forget_call()
            if (call := self._unfinished) is not None:
                call.suspend()
            self.drop_reload()  # the operator from `prepare_reload` belongs to the old group
            if handover.make_replica is not None:  # this standby worker was started with older settings
                hosted.follow(handover.make_replica.settings)
            hosted.world = world
            hosted.take_rank(world)
            if world.rank == handover.source and handover.takers:
                call = self._training
                run = None if call is None else call.state(with_metrics=False)
                hosted.send((hosted.state.read(), run), handover.takers)
            elif world.rank in handover.takers:
                self._take_over(*hosted.receive(handover.source, handover.takers))
            hosted.finish_regroup()
            names, call = hosted.names_of_all(), self._training
            if call is not None:
                call.keep_lost(names, handover.orphans)
            hosted.operator.world_changed()
            return hosted.facts()

    def _take_over(self, state: Mapping[str, Any], run: RunState | None) -> None:
        """Restore another rank's training state, and continue the training call from that rank's progress."""
        self._hosted.restore(state, None)
        self._hosted.draw_apart()
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
        call.meters.go_on_from(*own)
        call.take_over(replace(first, others={}, lost=lost))
        if hosted.gather is not None:
            rows = {}
            for each, name in enumerate(names):
                meters = hosted.operator._raysgd.new_meters()
                meters.go_on_from(*taken_over(everyones, each, size))
                rows[name] = meters.summary()
            call.rows.note(first.num_steps - 1, rows)
        self._training = call
        return call

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
                operator._raysgd.in_call(),
                around_batches(operator, "validate_batch"),
            ):
                began_at = cursor.num_batches_taken
                batches = StepLoop(cursor, parts, request.num_steps, redraw=request.redraw).batches()
                if (has_left := self._has_left) is not None:
                    batches = takewhile(lambda batch: not has_left(), batches)
                args, named = accepted(operator.validate, batches, info=dict(request.info), **options)
                call = EvaluationCall(cursor, began_at, request.num_steps, request.info, "validation")
                with self._evaluating(call), hosted.timers.record("validation"):
                    returned = operator.validate(*args, **named)
            answer = hosted.answer(returned, request, cursor.num_batches_taken - began_at)
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
        hosted, outputs, total = self._hosted, list[Any](), request.total
        progress = SimpleNamespace(source=None, num_batches_taken=request.num_done)
        with self._ledger.evaluating():
            hosted.set_timers(profile=False)
            with self._evaluating(EvaluationCall(progress, 0, total, request.info, "predict")), hosted.predicting():
                batches = hosted.to_predict(request, work, share)
                for output in outputs_of(hosted.operator, batches, request, hosted.as_array):
                    outputs.append(output)
                    done = request.num_done + len(outputs) * request.num_workers  # as if others had done as many
                    progress.num_batches_taken = done if total is None else min(done, total)
        return outputs

    def validate_on_loan(
        self, number: int, settings: Any, state: Any, request: EpochRequest, share: Any = None
    ) -> EpochAnswer | None:
        """Validate the training state of the training workers on this spare worker.

        If config changes cannot turn this worker's settings into `settings`, create an operator with `settings` for the
        validation. This happens, for example, if the state was trained with older settings. Afterward, create an
        operator with this worker's own settings again.

        Args:
            number: Number of this call on the spare worker. `leave_call` ends the call if the spare worker is needed to
                replace a lost worker.
            settings: Settings of the trainer when the state was copied.
            state: The training state to validate.
            request: The driver's request to validate.
            share: The validation data for this worker, if the driver provides it. Otherwise, None.

        Returns:
            The answer. None if `leave_call` has ended the call, because the validation may then be incomplete.
        """

        def has_left() -> bool:
            return self._last_left >= number

        own = self._hosted.settings
        if settings.follow(own):
            self.follow(settings)
        else:
            self.renew(settings, self._first_world)
        self.regroup(World(0, 1), StateHandover(0, ()))
        self._has_left = has_left
        try:
            self.restore(state, None)
            answer = self.validate(request, share)
        finally:
            self._has_left = None
            if not settings.follow(own):
                self.renew(own, self._first_world)
                self.warm_up()
            self._ledger.stand_by()
        return None if has_left() else answer

    def leave_call(self, number: int) -> None:
        """End the `validate_on_loan` call with this number, and all earlier ones. A second thread calls this method."""
        self._last_left = max(self._last_left, number)

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
        return None if call is None or call.progress.is_finished else call

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
            return hosted.heartbeat("broken off", call.num_batches_completed)
        return hosted.heartbeat(
            "training", call.num_batches_completed, hosted.parts.num_samples(call.meters), self._copies.newest
        )

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
        total, source = running.num_batches, cursor.source
        return CallProgress(
            num_steps=cursor.num_batches_taken - running.began_at,
            total=source.num_steps() if total is None and source is not None else total,
            epoch_idx=running.info.get("epoch_idx", max(0, self._hosted.feed.epoch - 1)),
            num_epochs=running.info.get("num_epochs"),
            loss=metrics.get("train_loss" if running.kind == "train" else "val_loss"),
            kind=running.kind,
            metrics=metrics,
        )
