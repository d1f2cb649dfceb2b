"""`TrainerCalls`: runs a trainer's `train`, `validate` and `test` calls, after their arguments were checked.

Each call is sent to the workers, their answers are checked and merged, and the result is added to the history. After a
training call, the driver records the call's throughput, and how the workers spent their time. A call runs in the
caller's thread or in the background. A validation in the background runs on a spare worker if there is one. If this
spare has to replace a lost worker, the validation starts over on another spare.

`predict` runs in rounds. A round is one call to all workers, which predict some batches each. If a worker dies during a
round, its batches are redistributed over the other workers and the round is repeated. Rounds have no side effects, so
no row is lost or duplicated. ADR 79 explains why predictions run in rounds.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import count, islice
from typing import Any, Literal

from raysgd.core import arguments as checks
from raysgd.core.arrays import trees
from raysgd.core.arrays.division import even_counts
from raysgd.core.config_keys import BATCH_SIZE, PLAIN_BATCH_SIZE
from raysgd.core.engine.shared.interface import Call, CallHandle, Left
from raysgd.core.engine.shared.types import World
from raysgd.core.engine.snapshots import NewestSnapshot
from raysgd.core.history.history import RecordBeside, as_test
from raysgd.core.numbers.results import CallProgress
from raysgd.exceptions import OnFailure
from raysgd.trainer.configuration import ReplicaSettings
from raysgd.trainer.driver.life import TrainerLife
from raysgd.trainer.driver.shared_data import DataSharing, Requests, stored_once
from raysgd.trainer.messages.comparison import ComparisonPace, difference
from raysgd.trainer.messages.epochs import BegunEpoch, EpochAnswer, EpochRequest
from raysgd.trainer.messages.prediction import DEFAULT_BATCH_SIZE, PredictionSource, PredictRequest

logger = logging.getLogger(__name__)

# Limits of a round of `predict`: its duration, and the size of its outputs.
_SHORT_S, _LONG_S = 0.25, 1.0
_MOST_BYTES = 64 * 2**20
_MOST_BATCHES = 1024
_LARGE_BYTES = 2**16

Validation = Callable[[Callable[[], None]], list[EpochAnswer]]
"""Function that runs a validation and returns the workers' answers.

Its argument is a function without arguments, which it calls repeatedly while it waits for the workers.
"""


def epoch_options(
    num_steps: int | None,
    profile: bool = False,
    reduce_results: bool = True,
    info: Mapping[str, Any] | None = None,
) -> EpochRequest:
    """Check the user's arguments to `train` or `validate`, and return the options of the call."""
    checks.refuse_text(profile=profile, reduce_results=reduce_results)
    return EpochRequest(checks.check_num_steps(num_steps), checks.check_info(info), profile)


class EpochLeft(Exception):
    """Raised when a training call has stopped early, because the run must pause or end.

    Attributes:
        states: Each rank's progress, as a `RunState`. Empty if the call could not stop between two steps.
        seconds: Seconds spent on training the epoch so far.
    """

    def __init__(self, states: Sequence[Any] = ()) -> None:
        super().__init__()
        self.states, self.seconds = states, 0.0


class TrainerCalls:
    """Runs the calls of one trainer.

    Args:
        life: The trainer's workers and settings.
    """

    def __init__(self, life: TrainerLife) -> None:
        self.life = life
        self._validation_starts_over = False
        self._comparisons = ComparisonPace()

    def requests(
        self,
        name: str,
        options: EpochRequest,
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
            sharing: Divides datasets over the workers. Default: the trainer's object for this.
            facts: What a worker reported after it ran `setup`. Default: the report of rank 0.
        """
        life, facts = self.life, facts or self.life.facts
        sharing = sharing or life.sharing
        starts_over = options.starts_over or self._validation_starts_over
        request = replace(options, starts_over=starts_over, seed=facts.seed)
        requests: Requests = [(request,)] * len(worlds)  # the same object for all ranks, so that it is pickled once
        # With `use_local`, rank 0 trains in the thread that otherwise waits for the workers and calls the listeners. So
        # rank 0 calls them between its steps.
        if life.group_settings.use_local and life.listeners.on_wait is not None:
            requests[0] = (replace(request, redraw=life.listeners.on_wait),)
        if dataset is not None:
            return sharing.with_data_of_call(requests, name, dataset, worlds)
        batches = facts.ray_batches.get(name)
        return requests if batches is None else sharing.with_registered(requests, name, batches, worlds)

    def train(
        self,
        options: EpochRequest,
        max_retries: int = 3,
        dataset: Any = None,
        reduce_results: bool = True,
        begun: BegunEpoch | None = None,
        leaves: Callable[[], bool] | None = None,
        of_fit: bool = False,
    ) -> Any:
        """Train for one epoch or some of its steps, and return the result for the user.

        Args:
            options: Options of the call, the same for all workers.
            max_retries: How many times to retry the call after a failure.
            dataset: Data to train on instead of the registered data, or None.
            reduce_results: Whether to merge the metrics of the workers.
            begun: The unfinished epoch to continue, if an earlier run stopped inside an epoch. Otherwise, None.
            leaves: Function that is called repeatedly while the workers train. When it returns True, the call stops,
                after the current step if possible.
            of_fit: Whether `fit` makes the call.

        Raises:
            EpochLeft: The call stopped because `leaves` returned True.
        """
        if dataset is None:
            self.life.warn_of_whole_batches()
        record = self.life.recorder.begin("train", of_fit)
        life, comparisons = self.life, self._comparisons
        runner, controller, listeners = life.framework.runner_cls, life.controller, life.listeners
        largest = life.largest_batch
        number = cache(lambda: controller.num_calls)  # `cache`, so that all attempts of this call use the same number
        attempts = count(1)
        # `requests` refers to this part of the call only. The whole call refers to `requests`, and a cycle would keep
        # the trainer alive after the program drops it.
        kind = Call(runner.train_epoch, changes_state=True, keeps_alike=True, is_repeatable=dataset is None)
        # The call can stop between two steps only if the position in the data can be saved.
        is_held = dataset is None and controller.facts[0].epoch_obstacle is None

        def requests(worlds: Sequence[World]) -> Requests:
            compares = len(worlds) > 1 and (comparisons.is_due or controller.snapshots.is_due_after(kind))
            of_attempt = replace(
                options, compares_ranks=compares, call_number=number(), attempt=next(attempts), begun=begun
            )
            if largest is not None:
                of_attempt = replace(of_attempt, largest_batch=largest.for_group(controller.ensure_group().workers))
            arguments = self.requests("train", of_attempt, dataset, worlds)
            if leaves is not None and controller.ensure_group().is_driver_only:  # no other thread watches `leaves`
                request, *shard = arguments[0]
                redraw = partial(self._between_steps, leaves if is_held else None)
                arguments[0] = (replace(request, redraw=redraw), *shard)
            return arguments

        def check_all(answers: Sequence[EpochAnswer]) -> None:
            assert {answer.call_number for answer in answers} == {number()}, (
                "each rank answers the call that it was asked"
            )
            life.framework.check_answers(life, "train", answers, options.num_steps)

        can_resume = dataset is None or life.framework.goes_on_with(dataset)
        with life.framework.shown(life):  # before `on_wait`, which is None without listeners
            call = replace(
                kind,
                args_for=requests,
                on_wait=listeners.on_wait if leaves is None or is_held else partial(self._break_off_where, leaves),
                resume=runner.resume_epoch if can_resume else None,
                check=check_all,
                divergence=difference,
                is_short=True,
                leaves=leaves if is_held else None,
                split=None if largest is None else largest.split,
            )
            began, answers = time.perf_counter(), list[EpochAnswer]()
            try:
                answers = self._run_measured(call, max_retries)
            except EpochLeft as left:
                left.seconds = time.perf_counter() - began + (0.0 if begun is None else begun.seconds)
                raise
            finally:
                if not answers:
                    life.sharing.forget()
            if len(answers) > 1:
                costs_s = [answer.weight_sums.seconds for answer in answers if answer.weight_sums is not None]
                comparisons.note_call(time.perf_counter() - began, costs_s)
            if dataset is not None:
                life.sharing.note_position("train", dataset, answers[0].place)
            listeners.tell_end("train", options, answers[0])
        life.recorder.trained = answers[0].epoch_idx + 1
        if largest is not None:
            largest.size = answers[0].largest_batch
        result = life.framework.merged(answers, reduce_results)
        self._warn_of_nan(result)
        return record(result, controller.num_workers)

    def _between_steps(self, leaves: Callable[[], bool] | None) -> None:
        """Between two steps, call the listeners, and stop the call if `leaves` returns True.

        Used if the driver is the only worker. Otherwise, the driver does this while it waits for the workers.
        """
        if self.life.listeners.on_wait is not None:
            self.life.listeners.on_wait()
        if leaves is not None and leaves():
            self.life.controller.monitor.hold_to_leave()

    def _break_off_where(self, leaves: Callable[[], bool]) -> None:
        """If `leaves` returns True, end the call at once, in the middle of a step. Otherwise, call the listeners.

        Used for training calls that are not stopped between two steps, because they could not continue there later.
        """
        if leaves():
            raise EpochLeft
        if self.life.listeners.on_wait is not None:
            self.life.listeners.on_wait()

    def _run_measured(self, call: Call, max_retries: int) -> list[EpochAnswer]:
        """Run a training call, and return the workers' answers by rank. Measure the call's samples per second."""
        controller, figures = self.life.controller, self.life.figures
        events = controller.history.events
        began, num_events = time.perf_counter(), len(events)
        figures.accounts.begin_call()
        try:
            ended = controller.run_or_leave(call, max_retries=max_retries)
            if isinstance(ended, Left):
                raise EpochLeft([part.progress for part in ended.parts])
            answers: list[EpochAnswer] = ended.values
            heartbeats = ((rank, answer.heartbeat) for rank, answer in enumerate(answers))
            figures.heartbeats = {rank: heartbeat for rank, heartbeat in heartbeats if heartbeat is not None}
            figures.accounts.note_times(figures.heartbeats)
        finally:
            figures.accounts.end_call()
        num_samples = sum(heartbeat.num_samples for heartbeat in figures.heartbeats.values())
        num_samples += sum(int(answer.num_inherited) for answer in answers)
        figures.samples_per_s = num_samples / (time.perf_counter() - began) or None
        figures.report()
        # 0 samples if the user's own training loop does not count them.
        is_continued = any(event.kind == "continued" for event in events[num_events:])
        if is_continued and 0 < num_samples < (num_used := max(each.num_used for each in answers)):
            logger.warning(
                "the metrics of this call cover %s of %s samples: what lost workers had not told the others of their "
                "metrics was lost with them. The training did use their samples",
                num_samples,
                num_used,
            )
        return answers

    def _warn_of_nan(self, result: Any) -> None:
        """Log a warning the first time that a merged metric with "loss" in its name is NaN."""
        values = result.items() if isinstance(result, Mapping) else ()
        names = [name for name, value in values if "loss" in str(name) and isinstance(value, float) and value != value]
        if names and self.life.once.is_first("nan"):
            logger.warning(
                "`%s` is NaN: lower the learning rate, clip gradients, or look for NaN in the data", names[0]
            )

    def validate(
        self,
        options: EpochRequest,
        dataset: Any,
        reduce_results: bool = True,
        of_fit: bool = False,
        inside: tuple[int, int] | None = None,
        kind: Literal["validation", "test"] = "validation",
    ) -> Any:
        """Evaluate on the validation data, or on `dataset` if it is not None. Return the result for the user.

        For a test, the names of the metrics start with `test_`. See `CallRecorder.begin` for the last three arguments.
        """
        record = self.life.recorder.begin(kind, of_fit, inside)
        answers = self.answers_of_validation(options, dataset)
        if not options.is_inside:
            self.life.framework.after_evaluation(self.life)
        result = self._checked(answers, options, reduce_results)
        return record(as_test(result) if kind == "test" else result, self.life.controller.num_workers)

    def _checked(self, answers: Sequence[EpochAnswer], options: EpochRequest, reduce_results: bool) -> Any:
        self.life.framework.check_answers(self.life, "validation", answers, options.num_steps)
        return self.life.framework.merged(answers, reduce_results)

    def answers_of_validation(self, options: EpochRequest, dataset: Any) -> list[EpochAnswer]:
        """Run a validation call, and return the workers' answers by rank.

        If the call raises an error, all ranks start the next validation from the first batch.

        Args:
            options: Options of the call, the same for all ranks.
            dataset: Data to use instead of the registered data, or None.
        """
        life = self.life
        call = Call(
            life.framework.runner_cls.validate,
            partial(self.requests, "validation", options, dataset),
            changes_state=life.facts.keeps_own_state,
            on_wait=life.listeners.on_wait,
            is_short=True,
            is_repeatable=dataset is None,
        )
        with OnFailure(self._start_over):
            answers: list[EpochAnswer] = life.controller.run(call)
        self._validation_starts_over = False
        life.listeners.tell_end("validation", options, answers[0])
        return answers

    def _start_over(self) -> None:
        self.life.sharing.forget()
        self._validation_starts_over = True

    @property
    def validates_beside(self) -> bool:
        """True if spare workers can validate while other workers train.

        If not, log a warning with the reason the first time.
        """
        group = self.life.group_settings
        if group.spare_workers and not group.use_local:
            return True
        if self.life.once.is_first("no spares"):
            if group.use_local:
                why = " because one of them is in the driver"
            elif not group.recovery.in_place or not self.life.framework.keeps_survivors:
                why = " because a trainer with these options cannot have spares"
            else:
                why = ": with `spare_workers=1` it runs on a separate worker"
            logger.warning("the validation runs on the workers that train, which wait for it%s", why)
        return False

    def begin_validation(
        self, options: EpochRequest, dataset: Any, reduce_results: bool = True, of_fit: bool = False
    ) -> CallHandle[Any]:
        """Start validating the current training state on a spare worker, while training continues.

        Return a handle to the validation.

        Args:
            options: Options of the call.
            dataset: Data to validate on instead of the registered data, or None.
            reduce_results: Whether to merge the metrics of the workers.
            of_fit: Whether `fit` makes the call. The handle's result is then a pair: the metrics, and the function that
                adds them to the history. Otherwise, they are added as soon as the validation ends.
        """
        life = self.life

        def take_state() -> tuple[Validation, RecordBeside]:
            newest, sharing = life.newest_snapshot(), life.new_sharing()
            validate = self.begin_on_spare(options, dataset, life.replicas.settings, sharing, newest)
            return validate, life.recorder.begin_beside(of_fit)

        def evaluate(taken: tuple[Validation, RecordBeside], on_wait: Callable[[], None]) -> Any:
            validate, add = taken
            began_at, began = time.time(), time.perf_counter()
            answers = validate(on_wait)
            result = self._checked(answers, options, reduce_results)
            ended = partial(add, result, began_at, time.perf_counter() - began)
            if of_fit:
                return result, ended
            ended()
            return result

        return life.begin_in_background(take_state, evaluate)

    def begin_on_spare(
        self,
        options: EpochRequest,
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
        controller = self.life.controller
        loan, facts = controller.lend_spare(), controller.facts[0]
        if loan is None and not controller.has_spares:
            logger.warning("there is no spare to validate: the workers that train do, which wait for it")
            answers = self.answers_of_validation(options, dataset)
            return lambda on_wait: answers
        arrived = cache(newest.result)

        def make_args() -> list[Any]:
            state = arrived()
            sharing.forget()
            requests = self.requests("validation", options, dataset, [World(0, 1)], sharing, facts)
            return [settings, state.shared_state if state.reference is None else state.reference, *requests[0]]

        validate = self.life.framework.runner_cls.validate_on_loan
        return lambda on_wait: [controller.run_on_spare(loan, validate, make_args, on_wait)]


def usual_batch_size(settings: ReplicaSettings, num_workers: int) -> Any:
    """Return the batch size of one worker for predictions. Take it from the config if possible, else use a default."""
    config, options = settings.config_for(num_workers), settings.batch_options
    return options.of_worker(config.get(BATCH_SIZE, config.get(PLAIN_BATCH_SIZE, DEFAULT_BATCH_SIZE)), num_workers)


def next_round_size(size: int, seconds: float, num_bytes: int, num_batches: int, num_workers: int) -> int:
    """Return how many batches to send to each worker in the next round.

    The number doubles after a short round and halves after a long round. It is limited to 1,024 batches, and by memory.

    Args:
        size: Number of batches that each worker predicted in the last round.
        seconds: Duration of the last round.
        num_bytes: Bytes of inputs and outputs in the last round, over all workers.
        num_batches: Number of batches in the last round, over all workers.
        num_workers: Number of workers.
    """
    wanted = size * 2 if seconds < _SHORT_S else size // 2 if seconds > _LONG_S else size
    fitting = _MOST_BYTES * num_batches // (max(1, num_bytes) * num_workers)
    return max(1, min(wanted, fitting, _MOST_BATCHES))


def outputs_in_rounds(
    life: TrainerLife, source: PredictionSource, info: Mapping[str, Any], has_target: bool | None, max_retries: int
) -> Iterator[Any]:
    """Predict in rounds, in each of which every worker predicts some of the batches. Yield the outputs in batch order.

    Args:
        life: The trainer's workers and settings.
        source: Source of the batches.
        info: The user's entries for the `batch_info` of `predict_batch`.
        has_target: Whether tuple batches end with a target. None to decide by the data.
        max_retries: How many times to repeat a round after a failure.
    """
    key, target = uuid.uuid4().hex, source.has_target if has_target is None else has_target
    size, num_done, total = 1, 0, source.num_batches
    known: Sequence[World] | None = None

    def requests(pieces: Sequence[Any], worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """Return the arguments for each rank in one round.

        In the first round, and after the group of workers has changed, include the data that every rank needs.
        """
        nonlocal known
        is_new, known = worlds is not known, worlds
        shares: list[tuple[Any, ...]] = [()] * len(worlds)
        if is_new and source.share is not None:
            shares = [(share,) for share in stored_once(life.store, [source.share] * len(worlds))]
        arguments, first, is_last = list[tuple[Any, ...]](), num_done, num_done + len(pieces) == total
        remaining = iter(pieces)
        for rank, num_own in enumerate(even_counts(len(pieces), len(worlds))):
            own = list(islice(remaining, num_own))
            request = PredictRequest(key, info, target, first, num_done, len(worlds), total, is_last)
            work, is_large = source.work(own), sum(map(trees.nbytes, own)) > _LARGE_BYTES
            arguments.append((request, life.store(rank, work) if is_large else work, *shares[rank]))
            first += len(own)
        return arguments

    def tell(expected: int | None, is_done: bool = False) -> None:
        life.listeners.tell(CallProgress(num_done, expected, 0, None, None, "predict", is_done=is_done))

    try:
        while pieces := list(islice(source.pieces, size * life.controller.num_workers)):
            began_at = time.monotonic()
            call = Call(life.framework.runner_cls.predict, partial(requests, pieces), on_wait=life.listeners.on_wait)
            answers = life.controller.run(call, max_retries=max_retries)
            outputs = [output for answer in answers for output in answer]
            num_bytes = sum(map(trees.nbytes, pieces)) + sum(map(trees.nbytes, outputs))
            size = next_round_size(size, time.monotonic() - began_at, num_bytes, len(pieces), len(answers))
            num_done += len(pieces)
            tell(total)
            yield from outputs
        tell(num_done, is_done=True)
    finally:
        source.close()
