"""The driver's side of training and validation calls: creates a request for each worker and handles the answers.

While a call runs, listeners are notified of its progress. Afterward, its throughput and time breakdown are available.
Validation that runs concurrently with training uses a spare worker, unless that spare is needed to replace a lost
worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any

from raysgd.callbacks.monitors import open_steps, summaries_of_steps
from raysgd.core import arguments as checks
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.shared.call import Call
from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import Heartbeat, World
from raysgd.core.engine.snapshots import NewestSnapshot
from raysgd.core.engine.status import TrainerStatus
from raysgd.core.history import readable
from raysgd.core.history.accounts import Accounts
from raysgd.core.history.gauges import Gauges
from raysgd.core.numbers.meters import NUM_SAMPLES, MetricSummary
from raysgd.core.numbers.results import CallProgress, ProgressKind, as_number, merge
from raysgd.exceptions import OnFailure
from raysgd.trainer.configuration.settings import ReplicaSettings
from raysgd.trainer.driver.shared_data import DataSharing, Requests
from raysgd.trainer.messages import replica_calls
from raysgd.trainer.messages.begun import BegunEpoch
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest
from raysgd.trainer.messages.joint_work import difference
from raysgd.trainer.messages.weight_sums import ComparisonPace

logger = logging.getLogger(__name__)

_OPEN_STEPS_S = 10.0  # seconds to wait: workers are idle during a save, but the machine may be busy

Validation = Callable[[Callable[[], None]], list[EpochAnswer]]
"""Function that validates. It takes a function that it calls repeatedly while it waits."""


def asked(
    num_steps: int | None,
    profile: bool = False,
    reduce_results: bool = True,
    info: Mapping[str, Any] | None = None,
) -> EpochRequest:
    """Check a call's arguments, and return the request to send to all replicas."""
    checks.refuse_text(profile=profile, reduce_results=reduce_results)
    return EpochRequest(checks.check_num_steps(num_steps), checks.check_info(info), profile, seed=0)


class EpochLeft(Exception):
    """Raised when a training call has stopped early, because the run must pause or end.

    Attributes:
        states: Each rank's progress, as a `RunState`. Empty if the call could not stop at a step.
        seconds: Training time of the epoch so far.
    """

    def __init__(self, states: Sequence[Any] = ()) -> None:
        super().__init__()
        self.states, self.seconds = states, 0.0


Listener = Callable[[CallProgress], None]

_ASK_FOR_STEPS_S = 1.0
_INSIDE_A_CALL = (
    "`on_progress` and `on_step_metrics` are called while the workers run a call, and the trainer cannot do anything "
    "else meanwhile. Validate and save in `on_epoch_trained`. To do so every 100 steps, pass "
    "`validate_every_n_steps=100` to `fit`, and `Checkpointing(every_n_steps=100)`."
)


class ProgressListeners:
    """Polls rank 0 for its progress while a call runs, and reports it to listeners. Without listeners, does nothing.

    Attributes:
        listeners: Functions that are called about ten times a second, and once after the call has returned.
    """

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self.listeners: list[Listener] = []

    @contextmanager
    def listening(self, *listeners: Listener) -> Iterator[None]:
        """Add these listeners for the duration of the block."""
        self.listeners += listeners
        try:
            yield
        finally:
            for listener in listeners:
                self.listeners.remove(listener)

    @property
    def on_wait(self) -> Callable[[], None] | None:
        """Function for the driver to call repeatedly while it waits, or None without listeners."""
        return self._tell_of_now if self.listeners else None

    def tell_end(self, kind: ProgressKind, asked: EpochRequest, answer: EpochAnswer) -> None:
        """Report to listeners that a call has returned."""
        numbers = {
            name: number for name, value in (answer.metrics or {}).items() if (number := as_number(value)) is not None
        }
        loss = numbers.get("last_train_loss" if kind == "train" else "val_loss")
        epochs = answer.epoch_idx, asked.info.get("num_epochs")
        self.tell(CallProgress(answer.num_steps, answer.num_steps, *epochs, loss, kind, numbers, is_done=True))

    def _tell_of_now(self) -> None:
        """Report rank 0's current progress to listeners, if rank 0 responds within a second.

        This is not part of the heartbeat, because reading metrics may wait for the device.
        """
        transfer = self._controller.ensure_group().fetch(0, replica_calls.progress)
        try:
            progress: CallProgress | None = transfer.result(1.0)
        except Exception as error:  # only log it: the call itself reports a lost worker
            logger.debug("no news of the running call: %s", error)
            return
        if progress is not None:
            self.tell(progress)

    def tell(self, progress: CallProgress) -> None:
        """Call all listeners. If a listener calls the trainer, the trainer raises an error."""
        with self._controller.turns.closed(_INSIDE_A_CALL):
            for listener in tuple(self.listeners):
                listener(progress)


class StepListener:
    """Polls all ranks for the metrics of the last steps, once a second and at the end of a training call.

    Args:
        controller: The workers' controller.
        tell: Called with a step that all ranks have reached, and the mean metrics over all ranks since the previously
            reported step. No step is reported twice.
    """

    def __init__(self, controller: ElasticController, tell: Callable[[int, dict[str, float]], None]) -> None:
        self._controller, self._tell = controller, tell
        self._last_step, self._asked_at = 0, 0.0

    def __call__(self, progress: CallProgress) -> None:
        if progress.kind != "train" or not (progress.is_done or time.monotonic() > self._asked_at + _ASK_FOR_STEPS_S):
            return
        self._ask(progress.is_done)

    def tell_rest(self) -> None:
        """Report the remaining metrics, up to the step where the call stopped."""
        self._ask(is_done=True)

    def open(self) -> tuple[tuple[int, MetricSummary], ...]:
        """Return each rank's step, and its metrics since the last reported mean. Empty if a rank does not respond."""
        group = self._controller.ensure_group()
        asked = [group.fetch(rank, open_steps) for rank in range(len(group))]
        try:
            return tuple(each.result(_OPEN_STEPS_S) for each in asked)
        except Exception as error:
            logger.warning(
                "the checkpoint lacks the metrics of the steps since the last log line, so the next one after a resume "
                "covers fewer steps: %s",
                error,
            )
            return ()

    def _ask(self, is_done: bool) -> None:
        group = self._controller.ensure_group()
        asked = [group.fetch(rank, summaries_of_steps, self._last_step) for rank in range(len(group))]
        try:
            told: list[Mapping[int, MetricSummary]] = [each.result(1.0) for each in asked]
        except Exception as error:  # the next poll requests these metrics again, unless the worker is lost
            logger.debug("no news of the steps: %s", error)
            told = [{}]
        self._asked_at = time.monotonic()
        until = (max if is_done else min)(max(each, default=0) for each in told)
        for step in sorted({step for each in told for step in each if self._last_step < step <= until}):
            self._last_step = step
            rows = [row for each in told if (row := each.get(step)) and row[NUM_SAMPLES]]  # padding has no mean
            self._tell(step, readable.chosen(merge(rows), None))


class EpochCalls:
    """Runs the `train` and `validate` calls of one trainer, and stores the measurements of the last call.

    Args:
        runner_cls: Class of the replicas, a `ClassRunner`.
        controller: The workers' controller.
        listeners: Listeners for the progress of calls.
        sharing: Shards data over the workers.
        use_local: Whether rank 0 runs in the driver, where it calls the listeners between its steps.
        name: Name of the trainer in Ray's metrics.
        used: Trainer options that performance warnings must not recommend, for example because they are already set.

    Attributes:
        controller: The workers' controller.
        listeners: Listeners for the progress of calls.
        sharing: Shards data according to the current config.
        samples_per_s: Samples per second in the last training call, or None before the first training call.
        accounts: Records of how calls spent their time.
    """

    def __init__(
        self,
        runner_cls: Any,
        controller: ElasticController,
        listeners: ProgressListeners,
        sharing: DataSharing,
        *,
        use_local: bool,
        name: str,
        used: Collection[str] = (),
    ) -> None:
        self._runner_cls = runner_cls
        self.controller = controller
        self.listeners = listeners
        self.sharing = sharing
        self._use_local = use_local
        self._gauges = Gauges(name)
        self._heartbeats: dict[int, Heartbeat] = {}
        self.samples_per_s: float | None = None
        self.accounts = Accounts(used=used)
        self._validation_starts_over = False
        self._comparisons = ComparisonPace()

    def requests(
        self,
        name: str,
        asked: EpochRequest,
        dataset: Any,
        worlds: Sequence[World],
        sharing: DataSharing | None = None,
        facts: Any = None,
    ) -> Requests:
        """Return one request for each rank. If the driver shards the data, each request includes the rank's shard.

        Each attempt at a call creates new requests, because the workers may have changed since the last attempt.

        Args:
            name: "train" or "validation".
            asked: The request that is common to all replicas.
            dataset: Data to use instead of the registered data, or None.
            worlds: Each rank's position in the group.
            sharing: Shards data over the worker group. Default: the trainer's `sharing`.
            facts: What a replica reported after setup. Default: rank 0's report.
        """
        sharing, facts = sharing or self.sharing, facts or self.controller.facts[0]
        starts_over = asked.starts_over or self._validation_starts_over
        request = replace(asked, seed=facts.seed, starts_over=starts_over)
        requests: Requests = [(request,)] * len(worlds)  # one object, so that the engine pickles it once for all ranks
        # Rank 0 runs in the driver and blocks it, so rank 0 calls the listeners.
        if self._use_local and self.listeners.listeners:
            requests[0] = (replace(request, redraw=self.listeners.on_wait),)
        if dataset is not None:
            return sharing.with_data_of_call(requests, name, dataset, worlds)
        batches = facts.ray_batches.get(name)
        return requests if batches is None else sharing.with_registered(requests, name, batches, worlds)

    def train(
        self,
        asked: EpochRequest,
        max_retries: int,
        dataset: Any,
        can_resume: bool,
        check: Callable[[Sequence[EpochAnswer]], None],
        begun: BegunEpoch | None = None,
        leaves: Callable[[], bool] | None = None,
    ) -> list[EpochAnswer]:
        """Run a training call.

        Args:
            asked: The request that is common to all replicas.
            max_retries: How many times to retry the call after a failure.
            dataset: Data to use instead of the registered data, or None.
            can_resume: Whether another group can continue the call with the remaining batches.
            check: Called with the answers before the call is committed. Raises an error if the replicas are not in
                sync.
            begun: Position inside the epoch from which to continue, if an earlier run stopped there.
            leaves: Called repeatedly. If it returns True, the call stops, at the next step if possible.

        Raises:
            EpochLeft: The call stopped because of `leaves`.
        """
        runner, comparisons, controller = self._runner_cls, self._comparisons, self.controller
        number = cache(lambda: controller.num_calls)  # all attempts use the number from the first attempt
        attempts = count(1)

        def requests(worlds: Sequence[World]) -> Requests:
            compares = len(worlds) > 1 and (comparisons.is_due or controller.snapshots.is_due_after(call))
            request = replace(asked, compares_ranks=compares, call=number(), attempt=next(attempts))
            found = self.requests("train", request, dataset, worlds)
            if leaves is not None and controller.ensure_group().is_driver_only:  # a single local worker has no monitor
                found[0] = (replace(found[0][0], redraw=partial(self._between_steps, call)), *found[0][1:])
            if begun is not None:
                found = [(begun.for_rank(rank, len(worlds)), *each) for rank, each in enumerate(found)]
            return found

        def check_all(answers: Sequence[EpochAnswer]) -> None:
            assert {answer.call for answer in answers} == {number()}, "each rank answers the call that it was asked"
            check(answers)

        # Hold the call between two steps only if the position can be saved.
        is_held = dataset is None and controller.facts[0].epoch_obstacle is None
        call = Call(
            runner.train_epoch if begun is None else runner.resume_left,
            requests,
            changes_state=True,
            keeps_alike=True,
            on_wait=self.listeners.on_wait if leaves is None or is_held else partial(self._break_off_where, leaves),
            resume=None if not can_resume else runner.resume_epoch if begun is None else runner.go_on_left,
            check=check_all,
            divergence=difference,
            is_short=True,
            is_repeatable=dataset is None,
            leaves=leaves if is_held else None,
        )
        began, answers = time.perf_counter(), list[EpochAnswer]()
        try:
            answers = self._run_measured(call, max_retries)
        except EpochLeft as left:
            left.seconds = time.perf_counter() - began + (0.0 if begun is None else begun.seconds)
            raise
        finally:
            if not answers:
                self.sharing.forget()
        if len(answers) > 1:
            costs_s = [answer.weight_sums.seconds for answer in answers if answer.weight_sums is not None]
            comparisons.note_call(time.perf_counter() - began, costs_s)
        if dataset is not None:
            self.sharing.note_place("train", dataset, answers[0].place)
        if self.listeners.listeners:
            self.listeners.tell_end("train", asked, answers[0])
        return answers

    def _between_steps(self, call: Call) -> None:
        """If the driver is the only worker: between two steps, call listeners and check whether to stop the call."""
        if self.listeners.on_wait is not None:
            self.listeners.on_wait()
        if call.leaves is not None and call.leaves():
            self.controller.hold_to_leave(call)

    def _break_off_where(self, leaves: Callable[[], bool]) -> None:
        """Call listeners, and abort the call if `leaves` returns True. For calls that cannot stop between two steps."""
        if leaves():
            raise EpochLeft
        if self.listeners.on_wait is not None:
            self.listeners.on_wait()

    def _run_measured(self, call: Call, max_retries: int) -> list[EpochAnswer]:
        """Run a training call and measure its samples per second."""
        events = self.controller.history.events
        began, num_events = time.perf_counter(), len(events)
        self.accounts.begin_call()
        try:
            found: list[Any] = self.controller.run(call, max_retries=max_retries)
            if isinstance(found[0], Capture):
                raise EpochLeft([each.progress for each in found])
            answers: list[EpochAnswer] = found
            self._heartbeats = {rank: each.heartbeat for rank, each in enumerate(answers) if each.heartbeat is not None}
            self.accounts.note_times(self._heartbeats)
        finally:
            self.accounts.end_call()
        num_samples = 0
        for answer in answers:
            num_samples += int(answer.num_inherited)
            num_samples += 0 if answer.heartbeat is None else answer.heartbeat.num_samples
        self.samples_per_s = num_samples / (time.perf_counter() - began) or None
        self.report()
        if any(event.kind == "continued" for event in events[num_events:]):
            _tell_what_is_measured(num_samples, max(each.num_used for each in answers))
        return answers

    def validate(self, asked: EpochRequest, dataset: Any) -> list[EpochAnswer]:
        """Run a validation call.

        If any rank raises an error, all ranks start the next validation from the first batch.

        Args:
            asked: The request that is common to all replicas.
            dataset: Data to use instead of the registered data, or None.
        """
        call = Call(
            self._runner_cls.validate,
            partial(self.requests, "validation", asked, dataset),
            changes_state=self.controller.facts[0].keeps_own_state,
            on_wait=self.listeners.on_wait,
            is_short=True,
            is_repeatable=dataset is None,
        )
        with OnFailure(self._start_over):
            answers: list[EpochAnswer] = self.controller.run(call)
        self._validation_starts_over = False
        if self.listeners.listeners:
            self.listeners.tell_end("validation", asked, answers[0])
        return answers

    def _start_over(self) -> None:
        self.sharing.forget()
        self._validation_starts_over = True

    def begin_on_spare(
        self, asked: EpochRequest, dataset: Any, settings: ReplicaSettings, sharing: DataSharing, newest: NewestSnapshot
    ) -> Validation:
        """Reserve a spare for a validation, and return the function that runs the validation.

        The caller must hold the controller's turn (the lock that lets one call run at a time) during this call, but not
        while the returned function runs. If no spare exists, the training workers validate immediately.

        Args:
            asked: The request for the spare.
            dataset: Data to use instead of the registered data, or None.
            settings: Settings of the training workers.
            sharing: Shards data according to `settings`.
            newest: The state to validate.
        """
        controller = self.controller
        loan, facts = controller.lend_spare(), controller.facts[0]
        if loan is None and not controller.has_spares:
            logger.warning("there is no spare to validate: the workers that train do, which wait for it")
            answers = self.validate(asked, dataset)
            return lambda on_wait: answers
        arrived = cache(newest.result)

        def make_args() -> list[Any]:
            state = arrived()
            sharing.forget()
            requests = self.requests("validation", asked, dataset, [World(0, 1)], sharing, facts)
            return [settings, state.shared_state if state.reference is None else state.reference, *requests[0]]

        return lambda on_wait: [controller.run_on_spare(loan, self._runner_cls.validate_on_loan, make_args, on_wait)]

    def report(self) -> None:
        """Publish the trainer's status and throughput in Ray's metrics, if due."""
        self._gauges.report(len(self.controller.history.events), self._glance)

    def _glance(self) -> TrainerStatus:
        found = self.controller.glance(self._heartbeats, self.samples_per_s)
        return self.with_ledger(found)

    def with_ledger(self, status: TrainerStatus) -> TrainerStatus:
        """Return a copy of the status with the time ledger, which shows how each rank spent its time."""
        self.accounts.note_times({each.rank: each.heartbeat for each in status.workers if each.heartbeat is not None})
        self.accounts.warn()
        return replace(status, ledger=self.accounts.ledger(len(status.workers)))

    def stop_reporting(self) -> None:
        """Stop publishing this trainer in Ray's metrics."""
        self.accounts.note_end()
        self._gauges.report_end()


def _tell_what_is_measured(num_samples: int, num_used: int) -> None:
    """If a failure inside the call lost some samples' metrics, warn that the call's metrics don't cover all samples."""
    if 0 < num_samples < num_used:  # 0: the user's own loop does not count samples
        logger.warning(
            "the metrics of this call cover %s of %s samples: what lost workers had not told the others of their "
            "metrics was lost with them. The training did use their samples",
            num_samples,
            num_used,
        )
