"""The driver's side of training and validation calls: sends each worker its request, and handles the answers.

While a call runs, functions that are registered as listeners receive its progress. After a training call, the driver
records the call's throughput, and how the workers spent their time. A validation that runs concurrently with training
uses a spare worker. If this spare has to replace a lost worker, the validation starts over on another spare.
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
from weakref import ref

from raysgd.callbacks.monitors import open_steps, summaries_of_steps
from raysgd.core import arguments as checks
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.shared.call import Call, Left
from raysgd.core.engine.shared.types import Heartbeat, World
from raysgd.core.engine.snapshots import NewestSnapshot
from raysgd.core.engine.transfers import ask_all
from raysgd.core.history import readable
from raysgd.core.history.accounts import Accounts
from raysgd.core.history.gauges import Gauges
from raysgd.core.history.status import TrainerStatus, glance
from raysgd.core.numbers.meters import MetricSummary
from raysgd.core.numbers.metric_meters import NUM_SAMPLES
from raysgd.core.numbers.results import CallProgress, ProgressKind, as_number, merge
from raysgd.exceptions import OnFailure
from raysgd.trainer.configuration.settings import ReplicaSettings
from raysgd.trainer.driver.shared_data import DataSharing, Requests
from raysgd.trainer.messages import replica_calls
from raysgd.trainer.messages.begun import BegunEpoch
from raysgd.trainer.messages.epochs import EpochAnswer, EpochOptions
from raysgd.trainer.messages.joint_work import difference
from raysgd.trainer.messages.weight_sums import ComparisonPace

logger = logging.getLogger(__name__)

Validation = Callable[[Callable[[], None]], list[EpochAnswer]]
"""Function that runs a validation and returns the workers' answers.

Its argument is a function without arguments, which it calls repeatedly while it waits for the workers.
"""


def epoch_options(
    num_steps: int | None,
    profile: bool = False,
    reduce_results: bool = True,
    info: Mapping[str, Any] | None = None,
) -> EpochOptions:
    """Check the user's arguments to `train` or `validate`, and return the options of the call."""
    checks.refuse_text(profile=profile, reduce_results=reduce_results)
    return EpochOptions(checks.check_num_steps(num_steps), checks.check_info(info), profile)


class EpochLeft(Exception):
    """Raised when a training call has stopped early, because the run must pause or end.

    Attributes:
        states: Each rank's progress, as a `RunState`. Empty if the call could not stop between two steps.
        seconds: Seconds spent on training the epoch so far.
    """

    def __init__(self, states: Sequence[Any] = ()) -> None:
        super().__init__()
        self.states, self.seconds = states, 0.0


Listener = Callable[[CallProgress], None]
StepReader = Callable[[bool], None]
"""Function that fetches the workers' records of their steps.

Its argument is True if a training call has just returned. While a call runs, the function is called about ten times a
second with False.
"""

_ASK_FOR_STEPS_S = 1.0
_INSIDE_A_CALL = (
    "`on_progress` and `on_step_metrics` are called while the workers run a call, and the trainer cannot do anything "
    "else meanwhile. Validate and save in `on_epoch_trained`. To do so every 100 steps, pass "
    "`validate_every_n_steps=100` to `fit`, and `Checkpointing(every_n_steps=100)`."
)


class ProgressListeners:
    """Asks rank 0 for its progress while a call runs, and reports that progress to listeners.

    Without listeners, rank 0 is not asked. Step readers are also called while a call runs, but do not need the
    progress.

    Attributes:
        listeners: Functions that receive the progress about ten times a second, and once after the call has returned.
        step_readers: Functions that fetch the workers' records of their steps.
    """

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self.listeners: list[Listener] = []
        self.step_readers: list[StepReader] = []

    @contextmanager
    def listening(self, *listeners: Listener, step_readers: Sequence[StepReader] = ()) -> Iterator[None]:
        """Report progress to these listeners too, and call these step readers, inside the block."""
        self.listeners += listeners
        self.step_readers += step_readers
        try:
            yield
        finally:
            for listener in listeners:
                self.listeners.remove(listener)
            for reader in step_readers:
                self.step_readers.remove(reader)

    @property
    def on_wait(self) -> Callable[[], None] | None:
        """Function that the driver calls repeatedly while it waits for the workers.

        None if there are neither listeners nor step readers.
        """
        return self._on_wait if self.listeners or self.step_readers else None

    def _on_wait(self) -> None:
        if self.listeners:
            self._tell_of_now()
        self._read_steps(is_done=False)

    def _read_steps(self, is_done: bool) -> None:
        with self._controller.turns.closed(_INSIDE_A_CALL):
            for reader in tuple(self.step_readers):
                reader(is_done)

    def tell_end(self, kind: ProgressKind, options: EpochOptions, answer: EpochAnswer) -> None:
        """Report to the listeners that a call has returned. After a training call, report this to the step readers too.

        Args:
            kind: The type of call.
            options: Options of the call.
            answer: Rank 0's answer.
        """
        if self.listeners:
            numbers = {
                name: number
                for name, value in (answer.metrics or {}).items()
                if (number := as_number(value)) is not None
            }
            loss = numbers.get("last_train_loss" if kind == "train" else "val_loss")
            epochs = answer.epoch_idx, options.info.get("num_epochs")
            self.tell(CallProgress(answer.num_steps, answer.num_steps, *epochs, loss, kind, numbers, is_done=True))
        if kind == "train" and self.step_readers:
            self._read_steps(is_done=True)

    def _tell_of_now(self) -> None:
        """Report rank 0's current progress to the listeners, if rank 0 responds within a second.

        The workers' heartbeats do not include this progress: reading metrics from a GPU may take long, and heartbeats
        must not wait.
        """
        transfer = self._controller.ensure_group().fetch(0, replica_calls.progress)
        try:
            progress: CallProgress | None = transfer.result(1.0)
        except Exception as error:  # only log the error: if the worker is lost, the running call itself reports that
            logger.debug("no news of the running call: %s", error)
            return
        if progress is not None:
            self.tell(progress)

    def tell(self, progress: CallProgress) -> None:
        """Call all listeners with this progress. If a listener calls the trainer, the trainer raises an error."""
        with self._controller.turns.closed(_INSIDE_A_CALL):
            for listener in tuple(self.listeners):
                listener(progress)


class StepMetricsReader:
    """Asks all ranks for the metrics of their last steps, once a second and at the end of a training call.

    Args:
        controller: Controller of the workers.
        tell: Function that receives the number of a step that all ranks have reached, and the metrics since the last
            report, averaged over all ranks. It receives no step twice.
    """

    def __init__(self, controller: ElasticController, tell: Callable[[int, dict[str, float]], None]) -> None:
        self._controller, self._tell = controller, tell
        self._last_step, self._asked_at = 0, 0.0

    def __call__(self, is_done: bool) -> None:
        if is_done or time.monotonic() > self._asked_at + _ASK_FOR_STEPS_S:
            self._ask(is_done)

    def tell_rest(self) -> None:
        """Report the metrics that have not been reported yet, up to the step where the training call stopped."""
        self._ask(is_done=True)

    def open(self) -> tuple[tuple[int, MetricSummary], ...]:
        """Return the metrics that each rank has measured since they were last averaged over all ranks and reported.

        There is one pair per rank that responds: the rank's current step, and its metrics.
        """
        metrics, failure = ask_all(self._controller.ensure_group(), open_steps, are_last=True)
        if failure is not None:
            logger.warning(
                "the checkpoint lacks metrics of the steps since the last log line, so the next one after a resume "
                "covers fewer steps or samples: %s",
                failure,
            )
        return tuple(metrics)

    def _ask(self, is_done: bool) -> None:
        by_rank: list[Mapping[int, MetricSummary]]
        group = self._controller.ensure_group()
        by_rank, failure = ask_all(group, summaries_of_steps, self._last_step, are_last=is_done)
        if failure is not None:
            logger.debug("no news of the steps: %s", failure)
            # A later request brings the metrics of all ranks, too. But there may be none after a rank was lost when the
            # workers had stopped, because a file of their last step may be saved now.
            if not by_rank or not is_done or isinstance(failure, TimeoutError):
                by_rank = [{}]
        self._asked_at = time.monotonic()
        until = (max if is_done else min)(max(steps, default=0) for steps in by_rank)
        for step in sorted({step for steps in by_rank for step in steps if self._last_step < step <= until}):
            self._last_step = step
            rows = [row for steps in by_rank if (row := steps.get(step)) and row[NUM_SAMPLES]]  # not of idle ranks
            self._tell(step, readable.chosen(merge(rows), None))


class EpochCalls:
    """Runs the `train` and `validate` calls of one trainer, and measures their throughput.

    Args:
        runner_cls: Class of the objects that run the calls in the workers. A subclass of `ClassRunner`.
        controller: Controller of the workers.
        listeners: Functions that receive the progress of calls.
        sharing: Divides datasets over the workers.
        use_local: Whether rank 0 runs in the driver, where it calls the listeners between its steps.
        name: Name of the trainer in Ray's metrics.
        used: Trainer options that performance warnings must not recommend, for example because they are already set.

    Attributes:
        controller: Controller of the workers.
        listeners: Functions that receive the progress of calls.
        sharing: Divides datasets over the workers according to the current config.
        samples_per_s: Samples per second in the last training call. None before the first training call, and if the
            call did not count samples.
        accounts: Records of how the workers have spent their time since the trainer's start.
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
        options: EpochOptions,
        dataset: Any,
        worlds: Sequence[World],
        sharing: DataSharing | None = None,
        facts: Any = None,
    ) -> Requests:
        """Return the request for each rank.

        If the driver divides the data, each rank's shard is added, unless the workers already have their shards. Each
        attempt at a call creates new requests, because the workers may have changed since the last attempt.

        Args:
            name: "train" or "validation".
            options: Options of the call, the same for all ranks.
            dataset: Data to use instead of the registered data, or None.
            worlds: Each worker's rank and group size.
            sharing: Divides datasets over the workers. Default: the `sharing` attribute.
            facts: What a worker reported after it ran `setup`. Default: the report of rank 0.
        """
        sharing, facts = sharing or self.sharing, facts or self.controller.facts[0]
        starts_over = options.starts_over or self._validation_starts_over
        request = replace(options, starts_over=starts_over).with_seed(facts.seed)
        requests: Requests = [(request,)] * len(worlds)  # the same object for all ranks, so that it is pickled once
        # With `use_local`, rank 0 trains in the thread that otherwise waits for the workers and calls the listeners. So
        # rank 0 calls them between its steps.
        if self._use_local and self.listeners.on_wait is not None:
            requests[0] = (replace(request, redraw=self.listeners.on_wait),)
        if dataset is not None:
            return sharing.with_data_of_call(requests, name, dataset, worlds)
        batches = facts.ray_batches.get(name)
        return requests if batches is None else sharing.with_registered(requests, name, batches, worlds)

    def train(
        self,
        options: EpochOptions,
        max_retries: int,
        dataset: Any,
        can_resume: bool,
        check: Callable[[Sequence[EpochAnswer]], None],
        begun: BegunEpoch | None = None,
        leaves: Callable[[], bool] | None = None,
    ) -> list[EpochAnswer]:
        """Run a training call, and return the workers' answers by rank.

        Args:
            options: Options of the call, the same for all ranks.
            max_retries: How many times to retry the call after a failure.
            dataset: Data to use instead of the registered data, or None.
            can_resume: Whether, after a failure, another group of workers can continue the call with the remaining
                batches.
            check: Function that receives the workers' answers before the call counts as completed. It raises an error
                if the answers contradict each other, for example because the workers' models are no longer equal.
            begun: The unfinished epoch to continue, if an earlier run stopped inside an epoch. Otherwise, None.
            leaves: Function that is called repeatedly while the workers train. When it returns True, the call stops,
                after the current step if possible.

        Raises:
            EpochLeft: The call stopped because `leaves` returned True.
        """
        runner, comparisons, controller = self._runner_cls, self._comparisons, self.controller
        number = cache(lambda: controller.num_calls)  # `cache`, so that all attempts of this call use the same number
        attempts = count(1)

        def requests(worlds: Sequence[World]) -> Requests:
            call = weak_call()
            assert call is not None, "a call that runs is referred to"
            compares = len(worlds) > 1 and (comparisons.is_due or controller.snapshots.is_due_after(call))
            of_attempt = replace(options, compares_ranks=compares, call=number(), attempt=next(attempts))
            arguments = self.requests("train", of_attempt, dataset, worlds)
            if leaves is not None and controller.ensure_group().is_driver_only:  # no other thread watches `leaves`
                request, *shard = arguments[0]
                arguments[0] = (replace(request, redraw=partial(self._between_steps, call)), *shard)
            if begun is not None:
                # Ranks with the same arguments keep sharing one object, so that it is pickled only once.
                with_begun = {id(each): (begun, *each) for each in arguments}
                arguments = [with_begun[id(each)] for each in arguments]
            return arguments

        def check_all(answers: Sequence[EpochAnswer]) -> None:
            assert {answer.call for answer in answers} == {number()}, "each rank answers the call that it was asked"
            check(answers)

        # The call can stop between two steps only if the position in the data can be saved.
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
        # The call refers to `requests`, which uses `weak_call`. With a strong reference, this would be a cycle, and the
        # cycle would keep the trainer alive after the program drops it.
        weak_call = ref(call)
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
            self.sharing.note_position("train", dataset, answers[0].place)
        self.listeners.tell_end("train", options, answers[0])
        return answers

    def _between_steps(self, call: Call) -> None:
        """Between two steps, call the listeners, and stop the call if its `leaves` function returns True.

        Used if the driver is the only worker. Otherwise, the driver does this while it waits for the workers.
        """
        if self.listeners.on_wait is not None:
            self.listeners.on_wait()
        if call.leaves is not None and call.leaves():
            self.controller.hold_to_leave(call)

    def _break_off_where(self, leaves: Callable[[], bool]) -> None:
        """If `leaves` returns True, end the call at once, in the middle of a step. Otherwise, call the listeners.

        Used for training calls that are not stopped between two steps, because they could not continue there later.
        """
        if leaves():
            raise EpochLeft
        if self.listeners.on_wait is not None:
            self.listeners.on_wait()

    def _run_measured(self, call: Call, max_retries: int) -> list[EpochAnswer]:
        """Run a training call, and return the workers' answers by rank. Measure the call's samples per second."""
        events = self.controller.history.events
        began, num_events = time.perf_counter(), len(events)
        self.accounts.begin_call()
        try:
            ended = self.controller.run_or_leave(call, max_retries=max_retries)
            if isinstance(ended, Left):
                raise EpochLeft([part.progress for part in ended.parts])
            answers: list[EpochAnswer] = ended.values
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

    def validate(self, options: EpochOptions, dataset: Any) -> list[EpochAnswer]:
        """Run a validation call, and return the workers' answers by rank.

        If the call raises an error, all ranks start the next validation from the first batch.

        Args:
            options: Options of the call, the same for all ranks.
            dataset: Data to use instead of the registered data, or None.
        """
        call = Call(
            self._runner_cls.validate,
            partial(self.requests, "validation", options, dataset),
            changes_state=self.controller.facts[0].keeps_own_state,
            on_wait=self.listeners.on_wait,
            is_short=True,
            is_repeatable=dataset is None,
        )
        with OnFailure(self._start_over):
            answers: list[EpochAnswer] = self.controller.run(call)
        self._validation_starts_over = False
        self.listeners.tell_end("validation", options, answers[0])
        return answers

    def _start_over(self) -> None:
        self.sharing.forget()
        self._validation_starts_over = True

    def begin_on_spare(
        self,
        options: EpochOptions,
        dataset: Any,
        settings: ReplicaSettings,
        sharing: DataSharing,
        newest: NewestSnapshot,
    ) -> Validation:
        """Reserve a spare worker for a validation, and return the function that runs the validation there.

        Callers of this method must hold the lock that lets the trainer run only one call at a time. They must release
        it before they call the returned function. If there is no spare worker, the training workers run the validation
        immediately.

        Args:
            options: Options of the call.
            dataset: Data to use instead of the registered data, or None.
            settings: Settings with which the operators of the training workers were created.
            sharing: Divides datasets over workers according to `settings`.
            newest: Handle to the snapshot of the training state that is validated.
        """
        controller = self.controller
        loan, facts = controller.lend_spare(), controller.facts[0]
        if loan is None and not controller.has_spares:
            logger.warning("there is no spare to validate: the workers that train do, which wait for it")
            answers = self.validate(options, dataset)
            return lambda on_wait: answers
        arrived = cache(newest.result)

        def make_args() -> list[Any]:
            state = arrived()
            sharing.forget()
            requests = self.requests("validation", options, dataset, [World(0, 1)], sharing, facts)
            return [settings, state.shared_state if state.reference is None else state.reference, *requests[0]]

        return lambda on_wait: [controller.run_on_spare(loan, self._runner_cls.validate_on_loan, make_args, on_wait)]

    def report(self) -> None:
        """Publish the trainer's status and throughput in Ray's metrics.

        Do nothing if this was done less than a second ago and no worker was lost or added since then.
        """
        self._gauges.report(len(self.controller.history.events), self._glance)

    def _glance(self) -> TrainerStatus:
        return self.with_ledger(glance(self.controller, self._heartbeats, self.samples_per_s))

    def with_ledger(self, status: TrainerStatus) -> TrainerStatus:
        """Return a copy of the status with the time ledger, which shows how each rank spent its time."""
        self.accounts.note_times({each.rank: each.heartbeat for each in status.workers if each.heartbeat is not None})
        self.accounts.warn()
        return replace(status, ledger=self.accounts.ledger(len(status.workers)))

    def stop_reporting(self) -> None:
        """Record in the time ledger that the trainer has ended.

        In Ray's metrics, set the trainer's numbers of workers and its throughput to 0.
        """
        self.accounts.note_end()
        self._gauges.report_end()


def _tell_what_is_measured(num_samples: int, num_used: int) -> None:
    """Warn if the metrics of a call do not cover all of its samples, because workers were lost during the call.

    Args:
        num_samples: Number of samples that the metrics cover. 0 if the user's own training loop does not count samples.
        num_used: Number of samples that the workers have trained on.
    """
    if 0 < num_samples < num_used:
        logger.warning(
            "the metrics of this call cover %s of %s samples: what lost workers had not told the others of their "
            "metrics was lost with them. The training did use their samples",
            num_samples,
            num_used,
        )
