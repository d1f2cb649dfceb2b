"""Training and validation calls in the driver: makes a request for each worker and handles the answers.

While a call runs, listeners hear of its progress. After it, its speed and its use of time are known. A validation
beside the training runs on a spare, unless the spare has to replace a lost worker.
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

_OPEN_STEPS_S = 10.0  # the workers are idle at a save, but the machine may be busy

Validation = Callable[[Callable[[], None]], list[EpochAnswer]]
"""Function that validates. Its argument is called while it waits."""


def asked(
    num_steps: int | None,
    profile: bool = False,
    reduce_results: bool = True,
    info: Mapping[str, Any] | None = None,
) -> EpochRequest:
    """Check the arguments of a call, and return the request for every replica."""
    checks.refuse_text(profile=profile, reduce_results=reduce_results)
    return EpochRequest(checks.check_num_steps(num_steps), checks.check_info(info), profile, seed=0)


class EpochLeft(Exception):
    """A training call stopped before its end on request.

    Attributes:
        states: Progress of each rank, as a `RunState`. Empty if the call could not stop at a step.
        seconds: Seconds of training in the epoch.
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
    """Asks rank 0 for its progress while a call runs, if there is a listener.

    Args:
        controller: The controller of the workers.

    Attributes:
        listeners: Functions that are called about ten times a second, and once when the call has returned.
    """

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self.listeners: list[Listener] = []

    @contextmanager
    def listening(self, *listeners: Listener) -> Iterator[None]:
        """Listen until the end of the block."""
        self.listeners += listeners
        try:
            yield
        finally:
            for listener in listeners:
                self.listeners.remove(listener)

    @property
    def on_wait(self) -> Callable[[], None] | None:
        """Function that the driver calls while it waits; None without listeners."""
        return self._tell_of_now if self.listeners else None

    def tell_end(self, kind: ProgressKind, asked: EpochRequest, answer: EpochAnswer) -> None:
        """Tell listeners that a call has returned."""
        numbers = {
            name: number for name, value in (answer.metrics or {}).items() if (number := as_number(value)) is not None
        }
        loss = numbers.get("last_train_loss" if kind == "train" else "val_loss")
        epochs = answer.epoch_idx, asked.info.get("num_epochs")
        self.tell(CallProgress(answer.num_steps, answer.num_steps, *epochs, loss, kind, numbers, is_done=True))

    def _tell_of_now(self) -> None:
        """Tell listeners the progress of rank 0, if it answers soon. It is no heartbeat, because it reads metrics."""
        transfer = self._controller.ensure_group().fetch(0, replica_calls.progress)
        try:
            progress: CallProgress | None = transfer.result(1.0)
        except Exception as error:  # not worth a failure: the call itself reports a lost worker
            logger.debug("no news of the running call: %s", error)
            return
        if progress is not None:
            self.tell(progress)

    def tell(self, progress: CallProgress) -> None:
        """Call all listeners. They cannot call the trainer meanwhile."""
        with self._controller.turns.closed(_INSIDE_A_CALL):
            for listener in tuple(self.listeners):
                listener(progress)


class StepListener:
    """Listener that asks all ranks for the metrics of `StepMetrics`, once a second and at the end of a call.

    Args:
        controller: The controller of the workers.
        tell: Function that is called with a step that all ranks have reached, and with the metrics since the step of
            the call before, as means over all ranks. No step comes twice.
    """

    def __init__(self, controller: ElasticController, tell: Callable[[int, dict[str, float]], None]) -> None:
        self._controller, self._tell = controller, tell
        self._last_step, self._asked_at = 0, 0.0

    def __call__(self, progress: CallProgress) -> None:
        if progress.kind != "train" or not (progress.is_done or time.monotonic() > self._asked_at + _ASK_FOR_STEPS_S):
            return
        self._ask(progress.is_done)

    def tell_rest(self) -> None:
        """Tell the metrics up to the step where the call stopped."""
        self._ask(is_done=True)

    def open(self) -> tuple[tuple[int, MetricSummary], ...]:
        """Return for each rank its step, and what it has measured since the last mean."""
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
        except Exception as error:  # the next call asks again, unless the worker is lost
            logger.debug("no news of the steps: %s", error)
            told = [{}]
        self._asked_at = time.monotonic()
        until = (max if is_done else min)(max(each, default=0) for each in told)
        for step in sorted({step for each in told for step in each if self._last_step < step <= until}):
            self._last_step = step
            rows = [row for each in told if (row := each.get(step)) and row[NUM_SAMPLES]]  # padding has no mean
            self._tell(step, readable.chosen(merge(rows), None))


class EpochCalls:
    """Runs the `train` and `validate` calls of one trainer, and keeps the figures of the last one.

    Args:
        runner_cls: Class of the replicas, a `ClassRunner`.
        controller: The controller of the workers.
        listeners: Listeners for the progress of calls.
        sharing: Divides data over the workers.
        use_local: Whether rank 0 is in the driver and calls the listeners itself.
        name: Name of the trainer in Ray's metrics.
        used: Options that warnings need not recommend.

    Attributes:
        controller: The controller of the workers.
        listeners: Listeners for the progress of calls.
        sharing: Divides data, by the current config.
        samples_per_s: Samples per second in the last training call; None before the first.
        accounts: Accounts of the time that calls took.
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
        """Return one request for each rank, with its share of the data that the driver divides.

        Each attempt makes new requests, because the workers may have changed.

        Args:
            name: "train" or "validation".
            asked: The request that is the same for all replicas.
            dataset: Data to use instead of the registered data, or None.
            worlds: The place of each rank in the group.
            sharing: Divides data over the group; None uses that of the trainer.
            facts: Facts of a replica; None uses the current ones of rank 0.
        """
        sharing, facts = sharing or self.sharing, facts or self.controller.facts[0]
        starts_over = asked.starts_over or self._validation_starts_over
        request = replace(asked, seed=facts.seed, starts_over=starts_over)
        requests: Requests = [(request,)] * len(worlds)  # one object, so that the engine packs it once for all ranks
        if self._use_local and self.listeners.listeners:  # rank 0 runs in the driver, so it calls them
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
            asked: The request for every replica.
            max_retries: How many times to repeat the call after a failure.
            dataset: Data to use instead of the registered data, or None.
            can_resume: Whether another group can continue the call with the remaining batches.
            check: Called with the answers before they count. Raises an error if the replicas are no longer equal.
            begun: Place at which an earlier run stopped in the epoch, to continue from there.
            leaves: Called now and then. True stops the call, at the next step if possible.

        Raises:
            EpochLeft: The call stopped because of `leaves`.
        """
        runner, comparisons, controller = self._runner_cls, self._comparisons, self.controller
        number = cache(lambda: controller.num_calls)  # fixed at the first attempt
        attempts = count(1)

        def requests(worlds: Sequence[World]) -> Requests:
            compares = len(worlds) > 1 and (comparisons.is_due or controller.snapshots.is_due_after(call))
            request = replace(asked, compares_ranks=compares, call=number(), attempt=next(attempts))
            found = self.requests("train", request, dataset, worlds)
            if leaves is not None and controller.ensure_group().is_driver_only:  # no monitor polls this group
                found[0] = (replace(found[0][0], redraw=partial(self._between_steps, call)), *found[0][1:])
            if begun is not None:
                found = [(begun.for_rank(rank, len(worlds)), *each) for rank, each in enumerate(found)]
            return found

        def check_all(answers: Sequence[EpochAnswer]) -> None:
            assert {answer.call for answer in answers} == {number()}, "each rank answers the call that it was asked"
            check(answers)

        is_held = dataset is None and controller.facts[0].epoch_obstacle is None  # else a file cannot hold the place
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
        """Do between two steps what a monitor does, if the driver is the only worker."""
        if self.listeners.on_wait is not None:
            self.listeners.on_wait()
        if call.leaves is not None and call.leaves():
            self.controller.hold_to_leave(call)

    def _break_off_where(self, leaves: Callable[[], bool]) -> None:
        """Break off a call that cannot stop at a step, if `leaves` says so. Called while the driver waits."""
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
        """Run a call of `validate`. If any rank raises an error, all ranks begin the next call with the first batch.

        Args:
            asked: The request for every replica.
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
        """Reserve a spare to validate a state, and return the function that validates.

        Take a turn for this call; the returned function needs none. If no spare is left and none will come, the
        workers that train validate at once.

        Args:
            asked: The request for the spare.
            dataset: Data to use instead of the registered data, or None.
            settings: Settings of the workers that train.
            sharing: Divides data by these settings.
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
        """Report the current figures to Ray's metrics."""
        self._gauges.report(len(self.controller.history.events), self._glance)

    def _glance(self) -> TrainerStatus:
        found = self.controller.glance(self._heartbeats, self.samples_per_s)
        return self.with_ledger(found)

    def with_ledger(self, status: TrainerStatus) -> TrainerStatus:
        """Return a status with the ledger added."""
        self.accounts.note_times({each.rank: each.heartbeat for each in status.workers if each.heartbeat is not None})
        self.accounts.warn()
        return replace(status, ledger=self.accounts.ledger(len(status.workers)))

    def stop_reporting(self) -> None:
        """Remove the trainer from Ray's metrics."""
        self.accounts.note_end()
        self._gauges.report_end()


def _tell_what_is_measured(num_samples: int, num_used: int) -> None:
    """Warn that the metrics cover only part of the samples, after a failure inside the call."""
    if 0 < num_samples < num_used:  # 0 samples: a loop of the user counts none
        logger.warning(
            "the metrics of this call cover %s of %s samples: what lost workers had not told the others of their "
            "metrics was lost with them. The training did use their samples",
            num_samples,
            num_used,
        )
