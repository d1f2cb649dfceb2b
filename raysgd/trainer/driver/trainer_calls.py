"""`TrainerCalls`: runs a trainer's `train`, `validate`, `test` and `predict` calls, after their arguments were checked.

Each call is sent to the workers, their answers are checked and merged, and the result is added to the history. A call
runs in the caller's thread or in the background. A validation in the background runs on a spare worker if there is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

from raysgd.core.arrays.containers import Container
from raysgd.core.engine.shared.call import CallHandle
from raysgd.core.history.history import Kind, RecordBeside, as_test
from raysgd.core.numbers.results import Metrics
from raysgd.exceptions import NoDataError
from raysgd.trainer.driver.calls import Validation
from raysgd.trainer.driver.life import TrainerLife
from raysgd.trainer.driver.predicting import PredictionRounds
from raysgd.trainer.messages.begun import BegunEpoch
from raysgd.trainer.messages.epochs import EpochAnswer, EpochOptions
from raysgd.trainer.messages.prediction_data import PredictionSource

logger = logging.getLogger(__name__)


Method = TypeVar("Method", bound=Callable[..., Any])


def recorded(kind: Kind) -> Callable[[Method], Method]:
    """Return a decorator for a method of `TrainerCalls`. Each successful call is added to the trainer's history.

    `fit` passes `of_fit=True` to the decorated method. For a validation inside an epoch, `fit` also passes `inside`,
    the epoch and step.

    Args:
        kind: The kind of calls: "train", "validation" or "test".
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(
            calls: TrainerCalls,
            /,
            *args: Any,
            of_fit: bool = False,
            inside: tuple[int, int] | None = None,
            **kwargs: Any,
        ) -> Any:
            began_at, began, life = time.time(), time.perf_counter(), calls.life
            result = method(calls, *args, **kwargs)
            seconds = time.perf_counter() - began
            life.recorder.record(kind, result, began_at, seconds, life.controller.num_workers, of_fit, inside)
            return result

        return cast("Method", call)

    return decorate


@dataclass(frozen=True)
class TrainerCalls:
    """Runs the calls of one trainer.

    A `TrainerCalls` refers to methods of its trainer. The trainer therefore does not keep a `TrainerCalls`, but creates
    a new one for each call. If the two objects referred to each other, Python would not free a trainer as soon as the
    user drops it.

    Attributes:
        life: The trainer's workers and settings.
        check_answers: Raises an error if the workers' answers to a call contradict each other:
            `check_answers(kind, answers, options)`. After a training call, this check runs before the call counts as
            completed.
        merge: Merges the workers' answers into the result that the user gets: `merge(answers, reduce_results)`.
        can_continue_on: Returns True if a training call on this dataset can continue in another group of workers after
            a failure.
        shown: Returns a context manager that displays the progress of the training call that runs in its block.
        after_evaluation: Called after an evaluation, which may have changed the states of the workers' random number
            generators.
    """

    life: TrainerLife
    check_answers: Callable[..., None]
    merge: Callable[[Sequence[EpochAnswer], bool], Any]
    can_continue_on: Callable[[Any], bool]
    shown: Callable[[], AbstractContextManager[Any]]
    after_evaluation: Callable[[], None]

    @recorded("train")
    def train(
        self,
        options: EpochOptions,
        max_retries: int = 3,
        dataset: Any = None,
        reduce_results: bool = True,
        begun: BegunEpoch | None = None,
        leaves: Callable[[], bool] | None = None,
    ) -> Any:
        """Train for one epoch or some of its steps, and return the result for the user.

        Args:
            options: Options of the call, the same for all workers.
            max_retries: How many times to retry the call after a failure.
            dataset: Data to train on instead of the registered data, or None.
            reduce_results: Whether to merge the metrics of the workers.
            begun: The unfinished epoch to continue, or None.
            leaves: Function that returns True when the call must stop early, or None.

        Raises:
            EpochLeft: The call stopped because `leaves` returned True.
        """
        check = partial(self.check_answers, "train", options=options)
        can_resume = dataset is None or self.can_continue_on(dataset)
        with self.shown():
            answers = self.life.epoch_calls.train(options, max_retries, dataset, can_resume, check, begun, leaves)
        self.life.recorder.trained = answers[0].epoch_idx + 1
        result = self.merge(answers, reduce_results)
        self._warn_of_nan(result)
        return result

    def _warn_of_nan(self, result: Any) -> None:
        """Log a warning the first time that a merged metric with "loss" in its name is NaN."""
        values = result.items() if isinstance(result, Mapping) else ()
        names = [name for name, value in values if "loss" in str(name) and isinstance(value, float) and value != value]
        if names and self.life.once.is_first("nan"):
            logger.warning(
                "`%s` is NaN: lower the learning rate, clip gradients, or look for NaN in the data", names[0]
            )

    def start_validation(self, options: EpochOptions, dataset: Any, reduce_results: bool, blocking: bool) -> Any:
        """Validate, and return the result, or a handle to the call if `blocking` is False.

        Raises:
            NoDataError: `blocking` is False, and there is no validation data.
        """
        work = partial(self.validate, options, dataset, reduce_results)
        if blocking:
            return work()
        if dataset is None and not self.life.facts.has_validation:
            raise NoDataError(
                "`validate(blocking=False)` has nothing to validate on: register validation data in `setup`, or pass "
                "`dataset`."
            )
        if not self.validates_beside:
            return self.life.background.begin(work)
        return self.begin_validation(options, dataset, reduce_results)

    @recorded("validation")
    def validate(self, options: EpochOptions, dataset: Any, reduce_results: bool = True) -> Any:
        """Evaluate on the validation data, or on `dataset` if it is not None. Return the result for the user."""
        return self._evaluated(options, dataset, reduce_results)

    @recorded("test")
    def test(self, options: EpochOptions, dataset: Any) -> Metrics:
        """Evaluate on `dataset`, and return the metrics. Their names start with `test_`."""
        return as_test(self._evaluated(options, dataset))

    def _evaluated(self, options: EpochOptions, dataset: Any, reduce_results: bool = True) -> Any:
        answers = self.life.epoch_calls.validate(options, dataset)
        if not options.is_inside:
            self.after_evaluation()
        self.check_answers("validation", answers, options)
        return self.merge(answers, reduce_results)

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
        self,
        options: EpochOptions,
        dataset: Any,
        reduce_results: bool,
        note: Callable[[RecordBeside, Any, float, float], object] | None = None,
    ) -> CallHandle[Any]:
        """Start validating the current training state on a spare worker, while training continues.

        Return a handle to the validation.

        Args:
            options: Options of the call.
            dataset: Data to validate on instead of the registered data, or None.
            reduce_results: Whether to merge the metrics of the workers.
            note: For `fit`: function that receives the result, in a background thread. Its first argument is the
                function that adds the result to the history. Its other arguments are the arguments for that function.
                If None, the result is added to the history as soon as the validation ends.
        """
        life = self.life

        def take_state() -> tuple[Validation, RecordBeside]:
            newest, sharing = life.newest_snapshot(), life.new_sharing()
            validate = life.epoch_calls.begin_on_spare(options, dataset, life.replicas.settings, sharing, newest)
            return validate, self.life.recorder.begin_beside(of_fit=note is not None)

        def evaluate(taken: tuple[Validation, RecordBeside], on_wait: Callable[[], None]) -> Any:
            validate, add = taken
            began_at, began = time.time(), time.perf_counter()
            answers = validate(on_wait)
            self.check_answers("validation", answers, options)
            result = self.merge(answers, reduce_results)
            call = result, began_at, time.perf_counter() - began
            add(*call) if note is None else note(add, *call)
            return result

        return life.background.begin(take_state, evaluate)

    def predict(
        self,
        source: PredictionSource,
        container: Container,
        *,
        info: Mapping[str, Any],
        has_target: bool | None,
        max_retries: int,
        streaming: bool,
    ) -> Any:
        """Predict on all workers, and return the predictions or, if `streaming` is True, an iterator over them.

        Args:
            source: Source of the batches.
            container: Collects the predictions.
            info: The user's entries for the `batch_info` of `predict_batch`.
            has_target: Whether tuple batches end with a target. None to decide by the data.
            max_retries: How many times to repeat a round of batches after a failure.
            streaming: Whether to predict lazily.
        """
        life = self.life
        predict = life.framework.runner_cls.predict
        rounds = PredictionRounds(
            life.controller, predict, source, info, has_target, max_retries, life.store, life.listeners
        )
        return container.stream(rounds.outputs()) if streaming else container.collect(rounds.outputs())
