"""Methods of class-based trainers for epochs: `train`, `validate`, `test`, `fit`, `epochs`, and their history."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

from raysgd import _arguments as checks
from raysgd._numbers.results import Metrics
from raysgd._text.log_lines import Once
from raysgd.callbacks.adapters import AnyCallback
from raysgd.callbacks.worker_callback import WorkerCallback, refuse_equal_keys
from raysgd.driver.calls import EpochCalls, Validation, asked
from raysgd.driver.fit_loop import Fit, FitOptions, FitProgress
from raysgd.driver.keeping import KeptTrainer
from raysgd.driver.sharing import DataSharing
from raysgd.engine.background_calls import BackgroundCalls
from raysgd.engine.controller import ElasticController
from raysgd.engine.keeper import Keeper
from raysgd.engine.shared.call import Call, CallHandle
from raysgd.engine.snapshots import NewestSnapshot
from raysgd.engine.worker import is_sendable
from raysgd.exceptions import NoDataError, UnpicklableError
from raysgd.history.history import CallRecorder, History, Kind, RecordBeside, as_test, recorded
from raysgd.messages.epochs import EpochAnswer, EpochRequest, merged
from raysgd.messages.settings import GroupSettings, ReplicaMaker

logger = logging.getLogger(__name__)


class FitMethods(ABC):
    """The methods of a trainer that trains in epochs; `ClassTrainer` completes it."""

    _calls: EpochCalls
    _background: BackgroundCalls
    _recorder: CallRecorder
    _once: Once
    _controller: ElasticController
    _group_settings: GroupSettings
    _settings: Any
    _replicas: ReplicaMaker
    _runner_cls: Any
    _note_fit: Callable[[FitProgress], None] | None = None
    """Keeps how far `fit` is, in a detached trainer."""
    _fit_progress: FitProgress | None = None
    """How far the next `fit` is already."""
    _goes_on = True
    """Whether a training call can continue in another group, or from a snapshot inside it."""
    _shows_progress = False
    """Whether something shows how far a training call is."""
    _runs_worker_callbacks = False
    """Whether replicas call callbacks around their steps."""

    def _kept_by(self, keeper: Keeper, note_fit: Callable[[FitProgress], None]) -> KeptTrainer:
        """Lets a detached trainer know what changes, so that its next process can continue."""
        self._note_fit = note_fit
        return KeptTrainer(self, keeper)

    @abstractmethod
    def _take_settings(self, settings: Any) -> None:
        """Makes workers that start from now on from other settings."""

    @abstractmethod
    def _new_sharing(self) -> DataSharing:
        """Return what divides data over workers with the settings of now."""

    @abstractmethod
    def _newest_snapshot(self) -> NewestSnapshot:
        """The state as it is now, once it is copied."""

    @property
    @abstractmethod
    def _facts(self) -> Any:
        """The facts that a replica reports after `setup`."""

    @property
    @abstractmethod
    def _keeps_survivors(self) -> bool:
        """True if the survivors of a failure can go on, as far as their framework is concerned."""

    @abstractmethod
    def _check_dataset(self, dataset: Any, training: bool, name: str = "dataset") -> None:
        """Refuses what cannot take the place of the registered data for one call."""

    def _shown(self) -> AbstractContextManager[Any]:
        """Shows how far a training call is, until the end of the block."""
        return nullcontext()

    def _goes_on_with(self, dataset: Any) -> bool:
        """Tells whether a training call over these data can continue where one over the registered data can."""
        return False

    @abstractmethod
    def _check_answers(self, kind: Kind, answers: Sequence[EpochAnswer], asked: EpochRequest) -> None:
        """Raises where the answers of the workers contradict each other; in training, before the call counts."""

    def _after_validation(self, trained: Mapping[str, Any], validated: Mapping[str, Any]) -> bool:
        """Lets what follows the results of an epoch see them, when `fit` has validated; True if something did."""
        return False

    _merged: Callable[[Sequence[EpochAnswer], bool], Any] = staticmethod(merged)
    """Makes the result of a call."""

    @overload
    def train(
        self,
        num_steps: int | None = ...,
        profile: bool = ...,
        reduce_results: Literal[True] = ...,
        max_retries: int = ...,
        info: Mapping[str, Any] | None = ...,
        dataset: Any = ...,
        *,
        blocking: Literal[True] = ...,
    ) -> Metrics: ...

    @overload
    def train(
        self,
        num_steps: int | None = ...,
        profile: bool = ...,
        reduce_results: bool = ...,
        max_retries: int = ...,
        info: Mapping[str, Any] | None = ...,
        dataset: Any = ...,
        *,
        blocking: Literal[True] = ...,
    ) -> Any: ...

    @overload
    def train(
        self,
        num_steps: int | None = ...,
        profile: bool = ...,
        reduce_results: bool = ...,
        max_retries: int = ...,
        info: Mapping[str, Any] | None = ...,
        dataset: Any = ...,
        *,
        blocking: Literal[False],
    ) -> CallHandle[Any]: ...

    @checks.answer_mistakes(
        "`trainer.fit(5)` for 5 epochs, `trainer.train()` for one, or `trainer.train(num_steps=100)` for 100 batches",
        unnamed="`train(%(given)s)` trains on %(given)s batches: for epochs write `fit(%(given)s)`",
    )
    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: Mapping[str, Any] | None = None,
        dataset: Any = None,
        *,
        blocking: bool = True,
    ) -> Any:
        """Trains for one pass over the data, or for `num_steps` batches per worker.

        With the creators of `TFTrainer`, it is one `fit` of Keras.

        Args:
            num_steps: Batches per worker. The next call continues where this one stops; passes follow one another. With
                creators it is the `steps_per_epoch` of this call.
            profile: Whether to add `profile`, the mean seconds of the phases of a single worker, and `timings`, what it
                spent its time on, in seconds: see `ledger`.
            reduce_results: Whether to merge the workers' metrics; False returns a list with one dict per worker.
            max_retries: How many times this call is run again after a failure.
            info: Handed to the operator.
            dataset: Trained on instead of the registered data, for this call: a loader or dataset of the framework,
                arrays, a data frame, a dataset of Ray Data, a function `(config, batch_size)` that returns a loader or
                dataset, and others; see `docs/data.md`. Not with creators.
            blocking: False returns a handle at once, while the workers train: `handle.result()` waits for the result,
                and Ctrl-C there ends the call. Other calls of the trainer come after it. With `use_local` it is over
                when the handle is returned.

        Returns:
            `num_samples`, `epoch`, `batch_count`, and each metric's mean over the samples and its last value. With
            creators `train_<name>` for each entry of the history of Keras, its last value.

        Raises:
            InvalidCountError: `max_retries` is negative, or `num_steps` is no count.
            WorkerError: Your code raised; also of the class that it raised. Never retried.
            WorkersLostError: Workers were lost and the retries are used up.
        """
        checks.check_max_retries(max_retries)
        request = asked(num_steps, profile, reduce_results, info)
        if dataset is not None:
            self._check_dataset(dataset, training=True)
        checks.refuse_text(blocking=blocking)
        work = partial(self._train, request, max_retries, dataset, reduce_results)
        return work() if blocking else self._background.begin(work)

    @recorded("train")
    def _train(self, request: EpochRequest, max_retries: int, dataset: Any, reduce_results: bool) -> Any:
        check = partial(self._check_answers, "train", asked=request)
        can_resume = self._goes_on and (dataset is None or self._goes_on_with(dataset))
        with self._shown() if self._shows_progress else nullcontext():
            answers = self._calls.train(request, max_retries, dataset, can_resume, check)
        result = self._merged(answers, reduce_results)
        self._warn_of_nan(result)
        return result

    def _warn_of_nan(self, result: Any) -> None:
        """Says once that a loss is no number any more."""
        values = result.items() if isinstance(result, Mapping) else ()
        names = [name for name, value in values if "loss" in str(name) and isinstance(value, float) and value != value]
        if names and self._once.is_first("nan"):
            logger.warning(
                "`%s` is NaN: lower the learning rate, clip gradients, or look for NaN in the data", names[0]
            )

    @overload
    def validate(
        self,
        num_steps: int | None = ...,
        profile: bool = ...,
        reduce_results: Literal[True] = ...,
        info: Mapping[str, Any] | None = ...,
        *,
        dataset: Any = ...,
        blocking: Literal[True] = ...,
    ) -> Metrics: ...

    @overload
    def validate(
        self,
        num_steps: int | None = ...,
        profile: bool = ...,
        reduce_results: bool = ...,
        info: Mapping[str, Any] | None = ...,
        *,
        dataset: Any = ...,
        blocking: Literal[True] = ...,
    ) -> Any: ...

    @overload
    def validate(
        self,
        num_steps: int | None = ...,
        profile: bool = ...,
        reduce_results: bool = ...,
        info: Mapping[str, Any] | None = ...,
        *,
        dataset: Any = ...,
        blocking: Literal[False],
    ) -> CallHandle[Any]: ...

    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: Mapping[str, Any] | None = None,
        *,
        dataset: Any = None,
        blocking: bool = True,
    ) -> Any:
        """Evaluates on the validation data, every sample once.

        Arguments and result are as in `train`, without `epoch`. With the creators of `TFTrainer` the result has
        `validation_<name>` for each metric of the model.

        With `blocking=False` it validates the weights as they are after the calls before, with the config of then,
        whatever changes meanwhile: on one of the `spare_workers` of the trainer, and training waits for a copy of the
        state alone. Without spares, the workers that train validate, and the next call waits for them.

        Raises:
            NoDataError: There is nothing to validate on.
            ValueError: With `blocking=False`: the operator's `validate` trains, which would be lost.
            WorkerError, WorkersLostError: As in `train`.
        """
        request = asked(num_steps, profile, reduce_results, info)
        if dataset is not None:
            self._check_dataset(dataset, training=False)
        checks.refuse_text(blocking=blocking)
        work = partial(self._validate, request, dataset, reduce_results)
        if blocking:
            return work()
        if dataset is None and not self._facts.has_validation:
            raise NoDataError(
                "`validate(blocking=False)` has nothing to validate on: register validation data in `setup`, or pass "
                "`dataset`."
            )
        if not self._validates_beside:
            return self._background.begin(work)
        return self._begin_validation(request, dataset, reduce_results, lambda add, *call: add(*call))

    @recorded("validation")
    def _validate(self, request: EpochRequest, dataset: Any, reduce_results: bool = True) -> Any:
        return self._evaluated(request, dataset, reduce_results)

    def _evaluated(self, request: EpochRequest, dataset: Any, reduce_results: bool = True) -> Any:
        answers = self._calls.validate(request, dataset)
        self._after_evaluation()
        self._check_answers("validation", answers, request)
        return self._merged(answers, reduce_results)

    def _after_evaluation(self) -> None:  # noqa: B027
        """Notes what an evaluation leaves behind in the workers that train."""

    @property
    def _validates_beside(self) -> bool:
        """True if the trainer has spares, which validate while others train; says once where it has none."""
        group = self._group_settings
        if group.spare_workers and not group.use_local:
            return True
        if self._once.is_first("no spares"):
            if group.use_local:
                why = " because one of them is in the driver"
            elif not group.recovery.in_place or not self._keeps_survivors:
                why = " because a trainer with these options cannot have spares"
            else:
                why = ": with `spare_workers=1` it runs on a separate worker"
            logger.warning("the validation runs on the workers that train, which wait for it%s", why)
        return False

    def _begin_validation(
        self,
        request: EpochRequest,
        dataset: Any,
        reduce_results: bool,
        note: Callable[[RecordBeside, Any, float, float], object],
    ) -> CallHandle[Any]:
        """Begins a validation beside the training, of the state after the calls that were made by now.

        Args:
            request: What the spare is asked.
            dataset: What takes the place of the registered data; None if nothing does.
            reduce_results: Whether to merge the metrics.
            note: Called in a thread with what adds it to the history, and with what that takes.
        """

        def take_state() -> tuple[Validation, RecordBeside]:
            newest, sharing = self._newest_snapshot(), self._new_sharing()
            validate = self._calls.begin_on_spare(request, dataset, self._replicas.settings, sharing, newest)
            return validate, self._recorder.begin_beside()

        def evaluate(taken: tuple[Validation, RecordBeside], on_wait: Callable[[], None]) -> Any:
            validate, add = taken
            began_at, began = time.time(), time.perf_counter()
            answers = validate(on_wait)
            self._check_answers("validation", answers, request)
            result = self._merged(answers, reduce_results)
            note(add, result, began_at, time.perf_counter() - began)
            return result

        return self._background.begin_beside(take_state, evaluate)

    @abstractmethod
    def save(self, checkpoint: str | PathLike[str]) -> Any:
        """Writes the state to a file."""

    @abstractmethod
    def load(self, checkpoint: str | PathLike[str]) -> Any:
        """Loads a file that `save` wrote."""

    @checks.answer_mistakes("`trainer.fit(5)` for 5 epochs")
    def fit(
        self,
        epochs: int,
        *,
        callbacks: Iterable[AnyCallback] = (),
        validation_freq: int = 1,
        dataset: Any = None,
        validation_dataset: Any = None,
        resume_from: str | Path | None = None,
        folder: str | Path | None = None,
        validate: Literal["inline", "async"] = "inline",
        progress: bool | None = None,
    ) -> History:
        """Trains for some epochs, validates after each of them, and calls callbacks. Call it again for more epochs.

        Args:
            epochs: How many more epochs to train. With `resume_from` it is the total: those that the checkpoint has
                count.
            callbacks: Objects of subclasses of `raysgd.callbacks.Callback`, called in this order.
            validation_freq: Validate after every so many epochs; 0 for never. Without validation data, nothing is
                validated, unless your class has its own `validate` and that needs none.
            dataset: Trained on instead of the registered data, as in `train`.
            validation_dataset: Validated on instead of the registered data, as in `validate`.
            resume_from: A file that `run.save` or `save` wrote, or its URI: loaded first. "auto" is the newest
                checkpoint that the callbacks find, as `Checkpointing` does, and starts from the beginning if there is
                none.
            folder: Where callbacks put their files, on a disk. Default: a new folder in `~/ray_results`.
            validate: "async" begins the next epoch while one of the `spare_workers` of the trainer validates the last
                one. Its row and what callbacks do about it are complete at the end of the next epoch.
                An epoch waits for the validation before the last one; none is left out.
            progress: Whether to show a `raysgd.callbacks.ProgressBar`. None does so in a terminal and in a notebook.

        Returns:
            One row per epoch, and all that happened.

        Raises:
            ValueError, TypeError: An argument is wrong, or a callback can do nothing in such a run. Nothing has begun.
            CallbackError: A callback failed. The state of the training is kept.
            WorkerError, WorkersLostError: As in `train`.
        """
        options = FitOptions(
            epochs, callbacks, validation_freq, dataset, validation_dataset, resume_from, folder, validate, progress
        )
        return Fit(self, options).run()

    @checks.answer_mistakes("`for row in trainer.epochs(5):` for 5 epochs")
    def epochs(
        self,
        epochs: int,
        *,
        callbacks: Iterable[AnyCallback] = (),
        validation_freq: int = 1,
        dataset: Any = None,
        validation_dataset: Any = None,
        resume_from: str | Path | None = None,
        folder: str | Path | None = None,
        validate: Literal["inline", "async"] = "inline",
    ) -> Iterator[dict[str, Any]]:
        """Trains as `fit` does, and gives you the results of each epoch when it ends.

        The next epoch begins when you ask for it. If you leave the loop, the run is stopped: callbacks see its end, and
        the trainer stays usable.

        Args:
            epochs: How many more epochs to train, as in `fit`.
            callbacks: As in `fit`, and so are the others.
            validation_freq: After how many epochs to validate.
            dataset: Trained on instead of the registered data.
            validation_dataset: Validated on instead of the registered data.
            resume_from: A file to load first, or "auto".
            folder: Where callbacks put their files.
            validate: As in `fit`. A row that you have been given is filled in later.

        Returns:
            The rows of the history, one after the other.

        Raises:
            ValueError, TypeError, CallbackError, WorkerError, WorkersLostError: As in `fit`.

        Examples:
            >>> for epoch in trainer.epochs(5):  # doctest: +SKIP
            ...     print(epoch["epoch"], epoch["train_loss"])
        """
        options = FitOptions(
            epochs, callbacks, validation_freq, dataset, validation_dataset, resume_from, folder, validate
        )
        return Fit(self, options).epochs()

    def test(self, dataset: Any) -> Metrics:
        """Evaluates on other data than the registered ones, as `validate(dataset=...)`; names begin with `test_`."""
        self._check_dataset(dataset, training=False)
        return self._test(dataset)

    @recorded("test")
    def _test(self, dataset: Any) -> Metrics:
        return as_test(self._evaluated(asked(None), dataset))

    @property
    def history(self) -> History:
        """Every call of `train`, `validate` and `test` since the start, and what happened to the workers."""
        return self._recorder.history

    def _use_worker_callbacks(self, callbacks: Sequence[tuple[str, WorkerCallback]]) -> None:
        """Lets these callbacks, and no others, run in the workers that there are, and in those to come.

        Raises:
            TypeError: This trainer has none in its workers.
            ValueError: Two of them cannot be told apart.
            UnpicklableError: One of them cannot be sent to a worker.
        """
        for name, callback in callbacks:
            if not self._runs_worker_callbacks:
                raise TypeError(
                    f"`{name}` runs in the workers, around each step, which `{type(self).__name__}` cannot do: leave "
                    "it out, or train with `TorchTrainer`."
                )
            if not is_sendable(callback):
                raise UnpicklableError(f"`{name}` runs in the workers, and `{callback!r}` cannot be pickled.")
        chosen = tuple(callback for _, callback in callbacks)
        refuse_equal_keys(chosen)
        revision = self._settings.callbacks_revision + 1
        with self._controller.turns.take_turn():
            self._take_settings(replace(self._settings, worker_callbacks=chosen, callbacks_revision=revision))
            if self._controller.group is not None:  # else the next workers are made with them
                self._on_all(self._runner_cls.follow, self._replicas.settings, changes_state=True, leaves_as_new=True)

    def _on_all(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Runs a method of the replicas on all of them; the options are those of a `Call`."""
        return self._controller.run(Call(function, lambda worlds: [args] * len(worlds), **options))
