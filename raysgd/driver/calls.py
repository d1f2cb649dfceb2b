"""Training and validation calls as the driver makes them: what each worker is asked, and what follows the answers.

While a call runs, listeners hear how far it is. After it, its speed is known, and where the time went. A validation
beside the training runs on a spare, as long as no lost worker has to be replaced by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

from raysgd import _arguments as checks
from raysgd._numbers.meters import NUM_SAMPLES, MetricSummary
from raysgd._numbers.results import CallProgress, ProgressKind, as_number, merge
from raysgd.callbacks.monitors import open_steps, summaries_of_steps
from raysgd.driver.sharing import DataSharing, Requests
from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.types import Heartbeat, World
from raysgd.engine.snapshots import NewestSnapshot
from raysgd.engine.status import TrainerStatus
from raysgd.exceptions import OnFailure
from raysgd.history import readable
from raysgd.history.accounts import Accounts
from raysgd.history.gauges import Gauges
from raysgd.messages import replica_calls
from raysgd.messages.begun import BegunEpoch
from raysgd.messages.epochs import EpochAnswer, EpochRequest
from raysgd.messages.joint_work import difference
from raysgd.messages.settings import ReplicaSettings
from raysgd.messages.weight_sums import ComparisonPace

logger = logging.getLogger(__name__)

Validation = Callable[[Callable[[], None]], list[EpochAnswer]]
"""Validates; gets what to call meanwhile."""


def asked(
    num_steps: int | None,
    profile: bool = False,
    reduce_results: bool = True,
    info: Mapping[str, Any] | None = None,
) -> EpochRequest:
    """Return what a call asks of every replica, checked."""
    checks.refuse_text(profile=profile, reduce_results=reduce_results)
    return EpochRequest(checks.check_num_steps(num_steps), checks.check_info(info), profile, seed=0)


class EpochLeft(Exception):
    """A training call was left before its end, because that was asked.

    Attributes:
        states: How far each rank was, as a `RunState`; none where the call could not be held at a step.
        seconds: How long the epoch had been trained.
    """

    def __init__(self, states: Sequence[Any] = ()) -> None:
        super().__init__()
        self.states, self.seconds = states, 0.0


Listener = Callable[[CallProgress], None]

_ASK_FOR_STEPS_S = 1.0
_INSIDE_A_CALL = (
    "`on_progress` and `on_step_metrics` are called while the workers run a call, and the trainer cannot do anything "
    "else meanwhile. Validate and save in `on_epoch_trained`. To do so every 100 steps, loop: "
    "`trainer.train(num_steps=100); trainer.validate(); trainer.save(path)`."
)


class ProgressListeners:
    """Asks rank 0 how far it is while a call runs, if there is a listener.

    Args:
        controller: Has the workers.

    Attributes:
        listeners: Called some ten times a second, and once when the call has returned.
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
        """The function that the driver calls while it waits; None where no one listens."""
        return self._tell_of_now if self.listeners else None

    def tell_end(self, kind: ProgressKind, asked: EpochRequest, answer: EpochAnswer) -> None:
        """Tell that a call has returned."""
        numbers = {
            name: number for name, value in (answer.metrics or {}).items() if (number := as_number(value)) is not None
        }
        loss = numbers.get("last_train_loss" if kind == "train" else "val_loss")
        epochs = answer.epoch_idx, asked.info.get("num_epochs")
        self.tell(CallProgress(answer.num_steps, answer.num_steps, *epochs, loss, kind, numbers, is_done=True))

    def _tell_of_now(self) -> None:
        """Tell how far rank 0 is, if it answers at once. A heartbeat must not wait for that: it reads metrics."""
        transfer = self._controller.ensure_group().fetch(0, replica_calls.progress)
        try:
            progress: CallProgress | None = transfer.result(1.0)
        except Exception as error:  # news are not worth a failure; the call itself reports the loss of the worker
            logger.debug("no news of the running call: %s", error)
            return
        if progress is not None:
            self.tell(progress)

    def tell(self, progress: CallProgress) -> None:
        """Tell all listeners, which cannot call the trainer."""
        with self._controller.turns.closed(_INSIDE_A_CALL):
            for listener in tuple(self.listeners):
                listener(progress)


class StepListener:
    """A listener that asks all ranks what `StepMetrics` has measured, once a second and at the end of a call.

    Args:
        controller: Has the workers.
        tell: Called with a step that all ranks have reached, and the metrics of the steps since the one before, as
            means over all ranks. No step comes twice.
    """

    def __init__(self, controller: ElasticController, tell: Callable[[int, dict[str, float]], None]) -> None:
        self._controller, self._tell = controller, tell
        self._last_step, self._asked_at = 0, 0.0

    def __call__(self, progress: CallProgress) -> None:
        if progress.kind != "train" or not (progress.is_done or time.monotonic() > self._asked_at + _ASK_FOR_STEPS_S):
            return
        self._ask(progress.is_done)

    def tell_rest(self) -> None:
        """Tell what was measured until the call was left."""
        self._ask(is_done=True)

    def open(self) -> tuple[tuple[int, MetricSummary], ...]:
        """Return what each rank has measured since the last mean, and after how many batches that is."""
        group = self._controller.ensure_group()
        asked = [group.fetch(rank, open_steps) for rank in range(len(group))]
        try:
            return tuple(each.result(1.0) for each in asked)
        except Exception as error:  # the next mean then covers fewer steps
            logger.debug("no news of the last steps: %s", error)
            return ()

    def _ask(self, is_done: bool) -> None:
        group = self._controller.ensure_group()
        asked = [group.fetch(rank, summaries_of_steps, self._last_step) for rank in range(len(group))]
        try:
            told: list[Mapping[int, MetricSummary]] = [each.result(1.0) for each in asked]
        except Exception as error:  # they are asked again, unless the worker is lost
            logger.debug("no news of the steps: %s", error)
            told = [{}]
        self._asked_at = time.monotonic()
        until = (max if is_done else min)(max(each, default=0) for each in told)
        for step in sorted({step for each in told for step in each if self._last_step < step <= until}):
            self._last_step = step
            rows = [row for each in told if (row := each.get(step)) and row[NUM_SAMPLES]]  # padding has no mean
            self._tell(step, readable.chosen(merge(rows), None))


class EpochCalls:
    """Runs the calls of `train` and `validate` of one trainer, and keeps what there is to tell of the last one.

    Args:
        runner_cls: The class of the replicas, a `ClassRunner`.
        controller: Has the workers.
        listeners: Are told how far a call is.
        sharing: Divides data over the workers.
        use_local: Whether rank 0 is in the driver, and draws for the listeners itself.
        name: Names the trainer to Ray's metrics.
        used: Options that no one needs to be advised to use.

    Attributes:
        controller: The same.
        listeners: The same.
        sharing: The same, of the present config.
        samples_per_s: Of the last training call; None before the first.
        accounts: Where the time went.
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
        """One request for each rank, with its part of what the driver divides.

        Made again for every attempt, because the workers may have changed.

        Args:
            name: "train" or "validation".
            asked: What every replica is asked.
            dataset: What takes the place of the registered data; None if nothing does.
            worlds: The group.
            sharing: Divides data over it; None for that of the trainer.
            facts: What a replica says of itself; None for those of now.
        """
        sharing, facts = sharing or self.sharing, facts or self.controller.facts[0]
        starts_over = asked.starts_over or self._validation_starts_over
        request = replace(asked, seed=facts.seed, starts_over=starts_over)
        requests: Requests = [(request,)] * len(worlds)  # one object: the engine then packs it once for all ranks
        if self._use_local and self.listeners.listeners:  # rank 0, in the driver, draws for them
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
            asked: What every replica is asked.
            max_retries: How many times it is repeated after a failure.
            dataset: What takes the place of the registered data; None if nothing does.
            can_resume: Whether it can continue with the batches that are left, in another group.
            check: Called with the answers before they count; raises where the replicas are not equal any more.
            begun: Where a run had left the epoch that is to be gone on with.
            leaves: Asked now and then whether to leave the call, at the next step if it can be held there.

        Raises:
            EpochLeft: It was left.
        """
        runner, comparisons, controller = self._runner_cls, self._comparisons, self.controller
        number = cache(lambda: controller.num_calls)  # while it is run for the first time

        def requests(worlds: Sequence[World]) -> Requests:
            compares = len(worlds) > 1 and (comparisons.is_due or controller.snapshots.is_due_after(call))
            found = self.requests("train", replace(asked, compares_ranks=compares, call=number()), dataset, worlds)
            if leaves is not None and controller.ensure_group().is_driver_only:  # which no one polls meanwhile
                found[0] = (replace(found[0][0], redraw=partial(self._between_steps, call)), *found[0][1:])
            if begun is not None:
                found = [(begun.for_rank(rank, len(worlds)), *each) for rank, each in enumerate(found)]
            return found

        def check_all(answers: Sequence[EpochAnswer]) -> None:
            assert {answer.call for answer in answers} == {number()}, "each rank answers the call that it was asked"
            check(answers)

        is_held = dataset is None and controller.facts[0].epoch_obstacle is None  # else a file cannot say where it was
        call = Call(
            runner.train_epoch if begun is None else runner.resume_left,
            requests,
            changes_state=True,
            keeps_alike=True,
            on_wait=self.listeners.on_wait if leaves is None or is_held else partial(self._break_off_where, leaves),
            resume=None if not can_resume else runner.resume_epoch if begun is None else runner.go_on_left,
            check=check_all,
            parted=difference,
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
        """Called where this process is the only worker, between two steps."""
        if self.listeners.on_wait is not None:
            self.listeners.on_wait()
        if call.leaves is not None and call.leaves():
            self.controller.hold_to_leave(call)

    def _break_off_where(self, leaves: Callable[[], bool]) -> None:
        """Called while a call runs that cannot be held at a step."""
        if leaves():
            raise EpochLeft
        if self.listeners.on_wait is not None:
            self.listeners.on_wait()

    def _run_measured(self, call: Call, max_retries: int) -> list[EpochAnswer]:
        """Run a training call, and note how many samples a second it trained."""
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
        """Run a call of `validate`. If it raises on any rank, the next one begins with the first batch on all.

        Args:
            asked: What every replica is asked.
            dataset: What takes the place of the registered data; None if nothing does.
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
        """Begin to validate a state on a spare, within a turn of the training. What it returns needs no turn.

        Where no spare is left and none will come, the workers that train validate at once.

        Args:
            asked: What the spare is asked.
            dataset: What takes the place of the registered data; None if nothing does.
            settings: Those of the workers that train.
            sharing: Divides data with these.
            newest: The state.
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
        """Give Ray's metrics the numbers of now."""
        self._gauges.report(len(self.controller.history.events), self._glance)

    def _glance(self) -> TrainerStatus:
        found = self.controller.glance(self._heartbeats, self.samples_per_s)
        return self.with_ledger(found)

    def with_ledger(self, status: TrainerStatus) -> TrainerStatus:
        """A status, and where the time went."""
        self.accounts.note_times({each.rank: each.heartbeat for each in status.workers if each.heartbeat is not None})
        self.accounts.warn()
        return replace(status, ledger=self.accounts.ledger(len(status.workers)))

    def stop_reporting(self) -> None:
        """Take the trainer out of Ray's metrics."""
        self.accounts.note_end()
        self._gauges.report_end()


def _tell_what_is_measured(num_samples: int, num_used: int) -> None:
    """After a failure inside the call: says why `num_samples` of the result is a part of what was trained on."""
    if 0 < num_samples < num_used:  # none: a loop of the user counts none
        logger.warning(
            "the metrics of this call cover %s of %s samples: what lost workers had not told the others of their "
            "metrics was lost with them. The training did use their samples",
            num_samples,
            num_used,
        )
