"""`ClassTrainer`: the common base class of `TorchTrainer` and `TFTrainer`.

A trainer runs epochs, predictions and functions on the training operators in all workers, and shuts down the workers. A
trainer can also change the config, the operator class or the training state in running workers without starting new
processes. Workers that start later receive the same change. If a change fails on one worker, all workers undo the
change.
"""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.sidecar import Sidecar, Sidecars
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core import arguments as checks
from raysgd.core.arrays.containers import Container
from raysgd.core.arrays.data_kinds import CallData
from raysgd.core.config_keys import BATCH_SIZE
from raysgd.core.engine.background_calls import BackgroundCalls
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.keeper import Keeper
from raysgd.core.engine.program_end import end_with
from raysgd.core.engine.shared.call import Call, CallHandle
from raysgd.core.engine.shared.connection import Connection
from raysgd.core.engine.shared.time_spent import TimeLedger
from raysgd.core.engine.shared.tracebacks import hide_library_frames
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot
from raysgd.core.engine.status import TrainerStatus
from raysgd.core.history import readable
from raysgd.core.history.history import CallRecorder, History, Kind, RecordBeside, as_test, recorded
from raysgd.core.numbers.results import Metrics
from raysgd.core.text.cards import card
from raysgd.core.text.log_lines import Once
from raysgd.exceptions import NoDataError, OnFailure, RaySGDError
from raysgd.storage.background_writer import BackgroundWriter, SubmittedWrite
from raysgd.trainer.configuration.batching import global_batch_in_words
from raysgd.trainer.configuration.recovery import Recovery
from raysgd.trainer.configuration.settings import GroupSettings, ReplicaMaker, ReplicaSettings
from raysgd.trainer.driver.calls import EpochCalls, ProgressListeners, Validation, asked
from raysgd.trainer.driver.changes import ReadOnlyConfig, naming_config_entries, refuse_changes, send_by_value
from raysgd.trainer.driver.fit_loop import FitOptions, FitRun
from raysgd.trainer.driver.make_controller import make_controller
from raysgd.trainer.driver.predicting import PredictionRounds, usual_batch_size
from raysgd.trainer.driver.saving import FileSaves, KeptTrainer
from raysgd.trainer.driver.shared_data import DataSharing, place_share
from raysgd.trainer.driver.trainer_port import FitProgress, NoteProgress, TrainerPort
from raysgd.trainer.messages import replica_calls
from raysgd.trainer.messages.begun import BegunEpoch
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest, merged
from raysgd.trainer.messages.prediction_data import BatchRequest, PredictionSource

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    AnyOperatorT = TypeVar("AnyOperatorT", default=Any)
else:
    from typing import TypeVar  # does not support `default` before Python 3.13

    AnyOperatorT = TypeVar("AnyOperatorT")

T = TypeVar("T")
TrainerT = TypeVar("TrainerT", bound="ClassTrainer[Any]")

logger = logging.getLogger(__name__)


@hide_library_frames
class ClassTrainer(ABC, Generic[AnyOperatorT]):
    """Base class of the trainers, which control training operators in several workers from the driver process.

    Each worker has a replica: an object that holds the worker's training operator in its attribute `operator`.
    """

    training_operator_cls: type[AnyOperatorT]
    initialization_hook: Callable[[], Any] | None
    num_cpus_per_worker: float
    use_gpu: bool
    backend: str
    timeout_s: float
    use_local: bool
    min_workers: int
    spare_workers: int
    recovery: Recovery
    _settings: Any
    _runner_cls: Any
    """Class of the replicas, the objects that run the trainer's calls in the workers. A subclass of `ClassRunner`."""
    _divide_by_hand: str
    """Advice in an error message for users whose workers each load their own shard of the data."""
    _note_fit: NoteProgress | None = None
    """In a detached trainer, the function that stores the progress of `fit` for a later process. Otherwise, None."""
    _fit_progress: FitProgress | None = None
    """Progress of an earlier process's `fit`, from which the next `fit` of this trainer continues. Usually None."""
    _begun_epoch: BegunEpoch | None = None
    """Epoch that the last `fit` left unfinished. The next `fit` continues it if the state has not changed since."""
    _left_file: str | None = None
    """File in which a detached trainer is saved if the trainer ends after the program that started it has exited."""
    _running_fit: Callable[[], Any] = staticmethod(lambda: None)
    """Function that returns the iterator over the epochs of the last `fit`, or None after the iterator was freed."""
    _leaves_epochs = False
    """True if `fit` can stop after any step of an epoch, and save the position in the epoch."""
    _shows_progress = False
    """True if the progress of training calls is displayed, for example as a progress bar."""
    _runs_worker_callbacks = False
    """True if the workers can call worker callbacks around their steps."""

    def __init__(self, group: GroupSettings, settings: ReplicaSettings) -> None:
        self._group_settings, self._settings, self._writer = group, settings, BackgroundWriter()
        self._place = partial(place_share, group.use_local)
        show_options(self, group, settings, settings.batch_options)
        self._replicas = ReplicaMaker(self._runner_cls)
        self._begin(self._make_controller())
        self._check_same_data()
        checks.warn_of_obstacle(
            self._facts.epoch_obstacle,
            snapshot_every_n_steps=settings.recovery.snapshot_every_n_steps,
            resize_interval_s=None if group.recovery.wait_for_workers else group.recovery.resize_interval_s,
        )
        if self._global_batch_in_words:
            logger.info("%s", self._global_batch_in_words)

    @property
    def _new_sharing(self) -> Callable[[], DataSharing]:
        """Return a function that creates a `DataSharing`, the object that divides datasets over the workers.

        The function uses the trainer's current settings. It holds no reference to the trainer, so that the trainer can
        be freed while the function is still in use.
        """
        replicas, place, call_data_of = self._replicas, self._place, self._call_data_of

        def new_sharing() -> DataSharing:
            settings = replicas.settings
            return DataSharing(settings.config, place, call_data_of, settings.batch_options.config_for)

        return new_sharing

    @abstractmethod
    def _make_connection(self) -> Connection:
        """Return the object with which the workers form a communication group of the framework."""

    @property
    def _renews_survivors(self) -> bool:
        """True if workers that survive a failure can load a snapshot in their processes, instead of in new ones."""
        return False

    @property
    @abstractmethod
    def _reservation_timeout_s(self) -> float:
        """Seconds to wait until Ray has reserved the workers' resources."""

    @property
    @abstractmethod
    def _keeps_survivors(self) -> bool:
        """True if workers that survive a failure can continue from their current training state, without a snapshot."""

    @abstractmethod
    def _check_dataset(self, dataset: Any, training: bool, name: str = "dataset") -> None:
        """Raise an error if one call cannot use this dataset instead of the data that the operator registered."""

    def _check_fit(self, epochs: int) -> None:
        """Raise an error if `fit` cannot train for this many epochs."""

    def _shown(self) -> AbstractContextManager[Any]:
        """Return a context manager that displays the progress of the training call that runs in its block."""
        return nullcontext()

    def _goes_on_with(self, dataset: Any) -> bool:
        """Return True if a training call on `dataset` can continue in another group of workers after a failure."""
        return False

    @abstractmethod
    def _check_answers(self, kind: Kind, answers: Sequence[EpochAnswer], asked: EpochRequest) -> None:
        """Raise an error if the workers' answers contradict each other.

        After a training call, this check runs before the call counts as completed.

        Args:
            kind: The type of call.
            answers: The answers by rank.
            asked: The request that the workers have answered.
        """

    def _after_validation(self, trained: Mapping[str, Any], validated: Mapping[str, Any]) -> bool:
        """After `fit` has validated, step the learning rate schedulers that depend on metrics.

        Args:
            trained: Metrics of the epoch's training.
            validated: Metrics of the epoch's validation.

        Returns:
            True if there are such schedulers.
        """
        return False

    _merged: Callable[[Sequence[EpochAnswer], bool], Any] = staticmethod(merged)
    """Function that merges the workers' answers into the result that the user's call to the trainer returns."""

    def _settings_to_send(self, settings: Any) -> ReplicaSettings:
        """Return the settings in a form that can be pickled and sent to other processes."""
        return settings

    def _take_settings(self, settings: ReplicaSettings) -> None:
        """Make these the trainer's settings, and use them for all workers that start later."""
        is_other = settings.revision != self._settings.revision
        self._settings = settings
        self._replicas.settings = self._settings_to_send(settings)
        show_options(self, settings)
        if is_other and self._controller.group is not None:
            # After `reload` or `reset_config`, end the spare workers, whose operators are outdated. Any other change of
            # the settings reaches a spare worker when it joins the group.
            self._controller.group.standby.kill_all()

    def _make_controller(self) -> ElasticController:
        """Return the controller that starts, replaces and ends the workers, for the arguments of this trainer."""
        self._replicas.settings = self._settings_to_send(self._settings)
        return make_controller(
            self._group_settings,
            self._replicas,
            self._make_connection(),
            self._reservation_timeout_s,
            keeps_survivors=self._keeps_survivors,
            renews_survivors=self._renews_survivors,
        )

    def _begin(self, controller: ElasticController) -> None:
        """Start the workers.

        The workers end at the latest when the trainer is garbage-collected, even if `shutdown` is never called.
        """
        self._controller = controller
        self._listeners = ProgressListeners(controller)
        self._recorder = CallRecorder(controller.history.events)
        self._background = BackgroundCalls(controller, at_once=self.use_local)
        self._calls = EpochCalls(
            self._runner_cls,
            controller,
            self._listeners,
            self._new_sharing(),
            use_local=self.use_local,
            name=f"{type(self).__name__}-{id(self):x}",
            used=self._used_options(),
        )
        self._once = Once()
        self._finalizer = end_with(self, _abandon, controller, self._background)
        self._saves = FileSaves(controller, self._writer)
        with naming_config_entries(self._settings.config):
            controller.start()
        controller.observe_with(self._calls.report)

    def _used_options(self) -> list[str]:
        """Return the trainer options that performance advice must not recommend to the user.

        These options are already set, or changing them cannot help.
        """
        recovery = self._settings.recovery
        used = {
            "spare_workers": self._group_settings.spare_workers > 0,
            # No snapshots are taken inside epochs, so advice to take them less often makes no sense.
            "snapshot_every_n_steps": recovery.snapshot_every_n_steps is None,
        }
        return [name for name, is_used in used.items() if is_used]

    def _kept_by(self, keeper: Keeper, note_fit: NoteProgress) -> KeptTrainer:
        """Return an object that records changes of this trainer's settings and history.

        From these records, a detached trainer continues in a new process if its process ends.

        Args:
            keeper: Store of the records.
            note_fit: Function that stores the progress of `fit`.
        """
        self._note_fit = note_fit
        return KeptTrainer(self, keeper)

    def _save_left(self, reason: str) -> None:
        """Save a detached trainer that is about to end, so that a later `fit(resume_from="auto")` finds the file.

        Args:
            reason: Why the trainer ends. It becomes the `stop_reason` of the history.
        """
        assert self._left_file is not None, "it has a folder"
        self.save(self._left_file)
        [epoch] = self._controller.run(Call(replica_calls.epochs_done, rank=0))
        self.history.stop_reason = reason
        Sidecars().write(self._left_file, Sidecar(epoch, self.history))

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
        """Train for one epoch, or for `num_steps` batches per worker.

        With the creator functions of `TFTrainer`, each call runs Keras's `fit` once.

        Args:
            num_steps: Batches per worker. The next call continues where this call stops, across epoch boundaries. With
                creator functions, this is Keras's `steps_per_epoch`.
            profile: Whether to add two entries about one worker: `profile`, the mean seconds of each phase, and
                `timings`, the seconds that the worker spent on each type of work (see `ledger`).
            reduce_results: Whether to merge the workers' metrics. False returns a list with one dict per worker.
            max_retries: How many times to retry this call after a failure.
            info: Values to pass to the operator's `train_epoch` and `train_batch`, by name.
            dataset: Data to train on in this call instead of the registered data: a loader or dataset of the framework,
                arrays, a data frame, a Ray Data dataset, a function `(config, batch_size)` that returns a loader or
                dataset, and others; see `docs/data.md`. Not with creator functions.
            blocking: False returns a handle immediately, while the workers train. `handle.result()` waits for the
                result, and Ctrl-C during that wait ends the call. Other calls of the trainer wait until this call
                finishes. With `use_local`, the call has already finished when you get the handle.

        Returns:
            `num_samples`, `epoch`, `batch_count`, and for each metric its mean over the samples and its last value.
            With creator functions, `train_<name>` is the last value of each entry in Keras's history.

        Raises:
            InvalidCountError: `max_retries` is negative, or `num_steps` is not a valid count.
            ValueError: This was called while `fit` is running, for example by a callback.
            WorkerError: Your code raised an error. It can also be caught by the class of your error. The call is not
                retried.
            WorkersLostError: Workers were lost and no retries are left.
        """
        self._refuse_inside_fit("train")
        checks.check_max_retries(max_retries)
        request = asked(num_steps, profile, reduce_results, info)
        if dataset is not None:
            self._check_dataset(dataset, training=True)
        checks.refuse_text(blocking=blocking)
        work = partial(self._train, request, max_retries, dataset, reduce_results)
        return work() if blocking else self._background.begin(work)

    @recorded("train")
    def _train(
        self,
        request: EpochRequest,
        max_retries: int = 3,
        dataset: Any = None,
        reduce_results: bool = True,
        begun: BegunEpoch | None = None,
        leaves: Callable[[], bool] | None = None,
    ) -> Any:
        check = partial(self._check_answers, "train", asked=request)
        can_resume = dataset is None or self._goes_on_with(dataset)
        with self._shown() if self._shows_progress else nullcontext():
            answers = self._calls.train(request, max_retries, dataset, can_resume, check, begun, leaves)
        self._recorder.trained = answers[0].epoch_idx + 1
        result = self._merged(answers, reduce_results)
        self._warn_of_nan(result)
        return result

    def _refuse_inside_fit(self, method: str) -> None:
        epochs = self._running_fit()
        if epochs is not None and epochs.gi_running:
            raise ValueError(
                f"`{method}` was called while `fit` runs, as in a callback, and would change its epochs. Call it after "
                "`fit`, or between two epochs: `for row in trainer.epochs(n): ...`"
            )

    def _warn_of_nan(self, result: Any) -> None:
        """Log a warning the first time a loss is NaN."""
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
        """Evaluate on the validation data, using every sample once.

        The arguments and the result are as in `train`, except that the result has no `epoch`. With the creator
        functions of `TFTrainer`, the result has `validation_<name>` for each metric of the model.

        With `blocking=False`, one of the trainer's `spare_workers` validates the weights and the config that earlier
        calls produced, even if later calls change them. Training waits only until the state is copied. Without spares,
        the training workers also validate, and the next call waits for them.

        Raises:
            NoDataError: There is no validation data.
            ValueError: With `blocking=False`: the operator's `validate` trains, and its changes would be lost.
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
        return self._begin_validation(request, dataset, reduce_results)

    @recorded("validation")
    def _validate(self, request: EpochRequest, dataset: Any, reduce_results: bool = True) -> Any:
        return self._evaluated(request, dataset, reduce_results)

    def _evaluated(self, request: EpochRequest, dataset: Any, reduce_results: bool = True) -> Any:
        answers = self._calls.validate(request, dataset)
        if not request.is_inside:
            self._after_evaluation()
        self._check_answers("validation", answers, request)
        return self._merged(answers, reduce_results)

    def _after_evaluation(self) -> None:
        """Called after an evaluation, in which the operators may have changed state of their own."""

    @property
    def _validates_beside(self) -> bool:
        """True if spare workers can validate while other workers train.

        If not, log a warning with the reason the first time.
        """
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
        note: Callable[[RecordBeside, Any, float, float], object] | None = None,
    ) -> CallHandle[Any]:
        """Start validating the current training state on a spare worker, while training continues.

        Args:
            request: The request to send to the spare worker.
            dataset: Data to validate on instead of the registered data, or None.
            reduce_results: Whether to merge the metrics of the workers.
            note: For `fit`: function that receives the result, in a background thread. Its first argument is the
                function that adds the result to the history. Its other arguments are the arguments for that function.
                If None, the result is added to the history as soon as the validation ends.
        """

        def take_state() -> tuple[Validation, RecordBeside]:
            newest, sharing = self._newest_snapshot(), self._new_sharing()
            validate = self._calls.begin_on_spare(request, dataset, self._replicas.settings, sharing, newest)
            return validate, self._recorder.begin_beside(of_fit=note is not None)

        def evaluate(taken: tuple[Validation, RecordBeside], on_wait: Callable[[], None]) -> Any:
            validate, add = taken
            began_at, began = time.time(), time.perf_counter()
            answers = validate(on_wait)
            self._check_answers("validation", answers, request)
            result = self._merged(answers, reduce_results)
            call = result, began_at, time.perf_counter() - began
            add(*call) if note is None else note(add, *call)
            return result

        return self._background.begin(take_state, evaluate)

    @abstractmethod
    def save(self, checkpoint: str | PathLike[str], blocking: bool = True) -> Any:
        """Write the training state to a file.

        Args:
            checkpoint: Path or URI of the file.
            blocking: Whether to wait until the file is complete.
        """

    @abstractmethod
    def load(self, checkpoint: str | PathLike[str]) -> Any:
        """Load the training state from a file that `save` wrote."""

    def _save_behind(self, checkpoint: str) -> SubmittedWrite | None:
        """Save a checkpoint in a background thread.

        Return an object that tells when the file is complete. Return None if the file is complete already.
        """
        return self._saves.submitted_by(partial(self.save, checkpoint, blocking=False))

    @abstractmethod
    def _save_snapshot(self, checkpoint: str, snapshot: Snapshot) -> None:
        """Write a snapshot, a copy of the training state that the driver holds, to a file. This calls no worker."""

    @abstractmethod
    def _place_in(self, snapshot: Snapshot) -> tuple[int, int]:
        """Return the number of epochs, and of batches over all epochs, that were trained before a snapshot was taken.

        A snapshot is a copy of the training state. The driver must hold this one already.
        """

    @checks.answer_mistakes("`trainer.fit(5)` for 5 epochs")
    def fit(
        self,
        epochs: int | None = None,
        *,
        max_steps: int | None = None,
        max_time: float | timedelta | str | None = None,
        callbacks: Iterable[Callback | WorkerCallback] = (),
        validation_freq: int = 1,
        validate_every_n_steps: int | None = None,
        dataset: Any = None,
        validation_dataset: Any = None,
        resume_from: str | Path | None = None,
        folder: str | Path | None = None,
        validate: Literal["inline", "async"] = "inline",
        progress: bool | None = None,
        log_every_n_steps: int = 50,
    ) -> History:
        """Train for some epochs, validate after each epoch, and call callbacks. Call `fit` again for more epochs.

        Args:
            epochs: How many more epochs to train. With `resume_from`, the total number, including the checkpoint's
                epochs. Optional if you pass `max_steps`.
            max_steps: Stop after this many more steps, even inside an epoch. A step is one batch on each worker. With
                `resume_from`, the total number. A later run can continue at the next step. For `TorchTrainer`.
            max_time: Time limit of this call: seconds, a `timedelta`, "23:30:00" or "1-12:00:00". The run stops at a
                step shortly before the limit and is saved if a callback saves. Time for two saves is reserved.
            callbacks: Instances of `raysgd.callbacks.Callback` or `WorkerCallback`, called in this order.
            validation_freq: Validate after every this many epochs; 0 for never. Without validation data, `fit`
                validates only if your class overrides `validate` with a method that needs no data.
            validate_every_n_steps: Also validate inside epochs, after every this many steps, counted over all epochs.
                This does not affect training. The results are passed to the callbacks' `on_validation` and added to
                `history.records`, but not to the history's rows. For `TorchTrainer`.
            dataset: Data to train on instead of the registered data, as in `train`.
            validation_dataset: Data to validate on instead of the registered data, as in `validate`.
            resume_from: Path or URI of a file that `run.save` or `save` wrote, to load before training. "auto" loads
                the newest checkpoint that a callback such as `Checkpointing` finds, or the file in the `folder` of
                `raysgd.Detached` if that file is from a later step. If there is no checkpoint, training starts from
                scratch.
            folder: Local folder for the callbacks' files. Default: a new folder in `~/ray_results`.
            validate: "inline" validates after an epoch, and then starts the next epoch. "async" starts the next epoch
                while one of the trainer's `spare_workers` validates the previous epoch. The row of an epoch is then
                complete, and callbacks have received it, at the end of the next epoch. No validation is skipped: each
                epoch ends by waiting for the previous epoch's validation.
            progress: Whether to show a `raysgd.callbacks.ProgressBar`. None shows it in a terminal or a notebook.
            log_every_n_steps: Pass training metrics to loggers and reports after every this many steps inside an epoch;
                0 for epochs only. For `TorchTrainer`.

        Returns:
            The history of the run: one row per epoch, and all events.

        Raises:
            ValueError, TypeError: An argument is invalid, or a callback cannot work in this run. No training has
                started.
            CallbackError: A callback failed. The training state is not lost.
            WorkerError, WorkersLostError: As in `train`.
            Preempted: The program received SIGTERM or SIGUSR1. The run stopped at a step, and was saved if a callback
                saves.
        """
        history, rows = self._begin_fit(locals())
        for _ in rows:
            pass
        return history

    @checks.answer_mistakes("`for row in trainer.epochs(5):` for 5 epochs")
    def epochs(
        self,
        epochs: int | None = None,
        *,
        max_steps: int | None = None,
        max_time: float | timedelta | str | None = None,
        callbacks: Iterable[Callback | WorkerCallback] = (),
        validation_freq: int = 1,
        validate_every_n_steps: int | None = None,
        dataset: Any = None,
        validation_dataset: Any = None,
        resume_from: str | Path | None = None,
        folder: str | Path | None = None,
        validate: Literal["inline", "async"] = "inline",
        log_every_n_steps: int = 50,
    ) -> Iterator[dict[str, Any]]:
        """Train as `fit` does, and yield the results of each epoch when it ends.

        The next epoch starts when your loop requests the next item. If you leave the loop, the run stops: `on_run_end`
        of the callbacks is called, and you can continue to use the trainer.

        Args:
            epochs: As in `fit`.
            max_steps: As in `fit`.
            max_time: As in `fit`.
            callbacks: As in `fit`.
            validation_freq: As in `fit`.
            validate_every_n_steps: As in `fit`.
            dataset: As in `fit`.
            validation_dataset: As in `fit`.
            resume_from: As in `fit`.
            folder: As in `fit`.
            validate: As in `fit`. With "async", the validation metrics are added to a row after it was yielded.
            log_every_n_steps: As in `fit`.

        Returns:
            An iterator over the rows of the history.

        Raises:
            ValueError, TypeError, CallbackError, WorkerError, WorkersLostError, Preempted: As in `fit`. A signal that
                arrives in the body of your loop takes effect when the loop requests the next epoch.

        Examples:
            >>> for epoch in trainer.epochs(5):  # doctest: +SKIP
            ...     print(epoch["epoch"], epoch["train_loss"])
        """
        return self._begin_fit(locals())[1]

    def _begin_fit(self, arguments: Mapping[str, Any]) -> tuple[History, Iterator[dict[str, Any]]]:
        """Check the arguments of `fit` or `epochs`. Return the run's history, and the iterator over its epochs."""
        options = FitOptions(**{name: value for name, value in arguments.items() if name != "self"})
        self._refuse_inside_fit("fit")
        kept, self._fit_progress = self._fit_progress, None
        begun, self._begun_epoch = self._begun_epoch, None
        if options.epochs is not None:
            self._check_fit(options.epochs)
        self._check_dataset(options.dataset, training=True)
        self._check_dataset(options.validation_dataset, training=False, name="validation_dataset")
        port = TrainerPort(
            new_run=partial(Run, trainer=self, name=self.training_operator_cls.__name__, config=self.config),
            history=self.history,
            calls=self._calls,
            once=self._once,
            runs_worker_callbacks=self._runs_worker_callbacks,
            use_worker_callbacks=self._use_worker_callbacks,
            train=self._train,
            validate=self._validate,
            validates_beside=lambda: self._validates_beside,
            begin_validation=self._begin_validation,
            after_validation=self._after_validation,
            save=lambda path: self.save(path),  # look up `save` when called: `raysgd.testing` may replace it
            load=lambda path: self.load(path),
            note_progress=self._note_fit,
            left_file=self._left_file,
            leaves_epochs=self._leaves_epochs,
            epoch_obstacle=lambda: self._facts.epoch_obstacle,
            save_behind=self._save_behind,
            save_snapshot=self._save_snapshot,
            place_in=self._place_in,
            settings=lambda: self._settings,
            kept=kept,
            begun=begun,
            note_begun=partial(setattr, self, "_begun_epoch"),
        )
        fit = FitRun(port, options)
        rows = fit.epochs()
        self._running_fit = weakref.ref(rows)
        return fit.history, rows

    def test(self, dataset: Any) -> Metrics:
        """Evaluate on `dataset`, as `validate(dataset=...)` does. The names of the metrics start with `test_`."""
        self._check_dataset(dataset, training=False)
        return self._test(dataset)

    @recorded("test")
    def _test(self, dataset: Any) -> Metrics:
        return as_test(self._evaluated(asked(None), dataset))

    @property
    def history(self) -> History:
        """The trainer's history: all `train`, `validate` and `test` calls, and all losses and additions of workers."""
        return self._recorder.history

    def _use_worker_callbacks(self, callbacks: Sequence[WorkerCallback]) -> None:
        """Let all workers call these worker callbacks, and no others, from now on. This includes later workers."""
        chosen = tuple(callbacks)
        revision = self._settings.callbacks_revision + 1
        with self._controller.turns.take_turn():
            self._take_settings(replace(self._settings, worker_callbacks=chosen, callbacks_revision=revision))
            if self._controller.group is not None:  # if no workers run, they get the callbacks when they start
                self._on_all(self._runner_cls.follow, self._replicas.settings, changes_state=True, leaves_as_new=True)

    def _on_all(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call `function(replica, *args)` in all workers, where `replica` is the object that holds the operator.

        Args:
            function: The function to call.
            *args: Arguments of the function after the replica.
            **options: Further arguments of the `Call` that the workers run.
        """
        return self._controller.run(Call(function, lambda worlds: [args] * len(worlds), **options))

    @property
    @abstractmethod
    def _call_data_of(self) -> Callable[[Any, Mapping[str, Any]], CallData | None]:
        """Function that returns how to divide data over the workers.

        Its arguments are the data that the user passed to a call, and the config of one worker.
        """

    @abstractmethod
    def _to_predict(self, data: Any, asked: BatchRequest) -> tuple[PredictionSource, Container]:
        """Return the source of the batches to predict, and the container that collects the predictions.

        Args:
            data: The data that the user passed to `predict`.
            asked: The user's arguments that say how to make batches of the data.
        """

    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        streaming: bool = False,
        feature_columns: Any = None,
        has_target: bool | None = None,
        info: Mapping[str, Any] | None = None,
        max_retries: int = 3,
    ) -> Any:
        """Predict on all workers. Return one prediction for each row of the data, in the order of the rows.

        Each batch is passed to the operator's `predict_batch`, in evaluation mode and without gradients. The batches
        are the same as in a single process, whatever the number of workers. The training state does not change.

        Args:
            data: An array or tensor, a tuple or dict of arrays or tensors, a data frame, a dataset or loader of the
                framework, a Ray Data dataset, `raysgd.data.Arrays` or `RayBatches`, or an iterator over batches.
            batch_size: Number of rows in a worker's batch. Default: the batch size of the data, otherwise the batch
                size in the config, otherwise 32.
            streaming: Whether to return an iterator that predicts lazily and yields one result per batch, for data or
                results that do not fit in memory.
            feature_columns: Columns to pass to the model, for a data frame or a Ray Data dataset.
            has_target: Whether the last element of tuple batches is a target, which is then removed. None assumes a
                target if batches of a dataset or loader have several elements, and no target in arrays that you pass.
            info: Values to add to `batch_info`.
            max_retries: How many times to retry a round of batches after a failure.

        Returns:
            The predictions, in the same type of container as `data`; see `docs/predict.md`. Arrays without rows are
            predicted as one empty batch.

        Raises:
            TypeError: The type of the data is not supported.
            ValueError: The order of the data cannot be preserved, a column is missing, or an output has a different
                number of rows than its batch.
            WorkerError: The operator raised an error. It can also be caught by the class of that error. The call is not
                retried.
            WorkersLostError: Workers were lost and no retries are left.
        """
        checks.refuse_text(streaming=streaming)
        if has_target is not None and not isinstance(has_target, bool):
            raise ValueError(f"`has_target={has_target!r}`: need True, False or None.")
        checks.check_max_retries(max_retries)
        info = checks.check_info(info)
        size = usual_batch_size(self._settings, self.num_workers) if batch_size is None else batch_size
        size = checks.check_count("batch_size", size, "It is the number of rows in a batch.")
        source, container = self._to_predict(data, BatchRequest(size, batch_size is not None, feature_columns))
        predict, listeners = self._runner_cls.predict, self._listeners
        rounds = PredictionRounds(
            self._controller, predict, source, info, has_target, max_retries, self._place, listeners
        )
        return container.stream(rounds.outputs()) if streaming else container.collect(rounds.outputs())

    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        """Load a state dict into all workers. Return once all workers have loaded it.

        Args:
            state_dict: The result of `state_dict`, from this or another trainer with any number of workers.
            blocking: Accepted for compatibility. Loading always blocks, so that no error goes unnoticed.

        Raises:
            KeyError: A part of the state is missing.
            ValueError: A part of the state does not fit the registered objects. The workers keep their old state.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"`load_state_dict` got `{type(state_dict).__name__}`: need what `state_dict` returns, a dict."
            )
        self._load_state(dict(state_dict))

    @abstractmethod
    def _load_state(self, state: dict[str, Any]) -> None:
        """Load a state dict, as `state_dict` returns it, into all workers."""

    # ----------------------------------------------------------------------------------------- changes in live workers

    def reset_config(self, config: Mapping[str, Any] | None = None) -> None:
        """Start over with a new config, as a new trainer would: create new operators in the same worker processes.

        With Horovod, the processes are new as well. The trained state is lost, so `save` it first if you need it.
        Random generators are reseeded only if the trainer has a `seed`.

        Args:
            config: The new config, as for a new trainer.

        Raises:
            ValueError, TypeError: The config is invalid. Nothing has changed.
            WorkerError: Your `setup` raised an error. It can also be caught by the class of your error. The workers
                were shut down, and the next call starts new workers with the new config.
        """
        self._begin_again(replace(self._settings, config=self._checked_config(config)))

    def _begin_again(self, settings: ReplicaSettings) -> None:
        with self._controller.turns.take_turn():  # wait for earlier calls, which still use the old settings
            self._take_settings(replace(settings, revision=settings.revision + 1, config_changes=()))
            self._calls.sharing = self._new_sharing()
            with naming_config_entries(settings.config):
                self._renew()
        self._check_same_data()

    def update_config(self, **changes: Any) -> None:
        """Change entries of the config in the running operators, which keep their state.

        The new values are set in each operator's `config`, and then its `config_changed` is called. With
        `TorchTrainer`, learning rates that equaled `config["lr"]` after `setup` then follow the new value by default.
        Workers that start later run `setup` with the old config and then `config_changed`, as the running workers did.

        Args:
            **changes: New values by name. The config must already have these names.

        Raises:
            ValueError: The config has no such entry, or the entry cannot be changed in running operators.
            UnpicklableError: A value cannot be sent to the workers.
            WorkerError: `config_changed` raised an error. It can also be caught by the class of that error. All workers
                keep the old config.
        """
        with self._controller.turns.take_turn():
            settings = self._with_changes(changes)
            with naming_config_entries(settings.config):
                options = {"changes_state": True, "keeps_alike": True, "is_repeatable": False}
                answers = self._on_all(self._runner_cls.change_config, self._settings_to_send(settings), **options)
            # Change the settings after the call, because the call itself also changes workers that start during it.
            self._take_settings(settings)
            self._calls.sharing.follow(settings.config)
        if answers[0]:
            logger.warning(
                "no optimizer follows %s: the operators find the new value in `self.config`. Override "
                "`config_changed(self, config, changed)` to do something with it",
                ", ".join(f"`config[{name!r}]`" for name in answers[0]),
            )

    def _with_changes(self, changes: Mapping[str, Any]) -> ReplicaSettings:
        """Check the changes to the config, and return the settings with the new config."""
        config = self._settings.config
        refuse_changes(config, changes)
        # Take the old values from `_replicas`, where they are in a form that can be pickled.
        before = {name: self._replicas.settings.config[name] for name in changes}
        return replace(
            self._settings,
            config=self._checked_config(checks.with_entries(config, changes)),
            config_changes=(*self._settings.config_changes, before),
        )

    def reload(self, training_operator_cls: type[AnyOperatorT]) -> None:
        """Switch to another operator class, usually an edited version, in the same workers and with the same state.

        Each worker creates an operator of the new class and loads the old operator's state into it. The old operators
        are discarded only after all workers have succeeded. If the new class changes hyperparameters of optimizers, the
        new values apply. Attributes that are not part of the state are set by the new `setup`.

        Args:
            training_operator_cls: The new class.

        Raises:
            TypeError: The argument is not an operator class.
            ValueError: The state does not fit the objects that the new class registers, or the trainer uses FSDP,
                Horovod or creator functions. All workers keep the old class.
            WorkerError: `setup` of the new class raised an error. It can also be caught by the class of that error. All
                workers keep the old class.
        """
        self._check_reload(training_operator_cls)
        with self._controller.turns.take_turn():
            self._reload(training_operator_cls)

    def _reload(self, training_operator_cls: type[Any]) -> None:
        revision = self._settings.revision + 1
        settings = replace(
            self._settings, training_operator_cls=training_operator_cls, revision=revision, config_changes=()
        )
        if self._group_settings.is_driver_only:
            self._controller.ensure_group()
        else:
            send_by_value(training_operator_cls)
            self._newest_snapshot()  # start to transfer a snapshot to the driver; `snapshot()` below waits for it
        edited = self._prepared(settings)
        if not self._group_settings.is_driver_only:
            self._controller.snapshot()  # workers that start later load it instead of repeating calls of the old class
        with self._adopted(settings):
            options = {"changes_state": bool(edited), "keeps_alike": True, "is_repeatable": False}
            finish = partial(self._on_all, self._runner_cls.finish_reload, revision, edited, **options)
            facts = finish()
            if None in facts:  # a worker that has just joined did not prepare the new operator: restart all workers
                self._controller.kill_group()
                self._controller.ensure_group()
                facts = finish()
        self._calls.sharing.forget()
        self._controller.keep_facts(facts)

    @abstractmethod
    def _check_reload(self, training_operator_cls: Any) -> None:
        """Raise an error if `reload` got no operator class, or if the workers cannot hold a second operator."""

    def _prepared(self, settings: ReplicaSettings) -> Any:
        """Create an operator of the new class in all workers, beside the old operator.

        Return the hyperparameters of optimizers that the new class changes.
        """
        with OnFailure(self._drop_prepared):
            answers = self._on_all(self._runner_cls.prepare_reload, settings, keeps_alike=True)
            for name in ("train_data", "validation_data"):
                found = [getattr(facts, name) for facts, _ in answers]
                if len(set(found)) > 1:
                    raise ValueError(
                        f"`reload({settings.training_operator_cls.__name__})`: the workers registered different "
                        f"{name.replace('_', ' ')}: {found}. The old class is kept."
                    )
        return answers[0][1]

    def _drop_prepared(self) -> None:
        with suppress(RaySGDError):  # an error here must not hide the error that made `reload` fail
            if self._controller.group is not None:
                self._on_all(self._runner_cls.drop_reload)

    def take_state_of(self, other: Any) -> None:
        """Load the state of another live trainer, without a file.

        If the configs differ, the optimizers keep the hyperparameters that this trainer's `setup` chose, and schedules
        are rescaled to a new learning rate.

        Args:
            other: A trainer of the same class with the same type of operators, and any number of workers.

        Raises:
            TypeError: `other` is not a trainer of this class.
            ValueError, KeyError: The state does not fit, and the workers keep their old state. Or a schedule cannot be
                rescaled to the config's learning rate; the workers then have already loaded the state of `other`.
        """
        if not isinstance(other, ClassTrainer) or other._runner_cls is not self._runner_cls:
            raise TypeError(
                f"`take_state_of` got a `{type(other).__name__}`: need a trainer of the same kind, a "
                f"`{type(self).__name__}`."
            )
        self._load_snapshot(other._shared_snapshot())
        if dict(other.config) != dict(self.config):
            self._follow_config()

    @abstractmethod
    def _load_snapshot(self, snapshot: Snapshot) -> None:
        """Load a snapshot of this or another trainer into all workers.

        Subclasses must not modify the snapshot, because other trainers may still use it.
        """

    def _follow_config(self) -> None:
        self._on_all(self._runner_cls.follow_config, changes_state=True, keeps_alike=True)

    @contextmanager
    def _adopted(self, settings: ReplicaSettings) -> Iterator[None]:
        """Make these the trainer's settings. If the block raises an error, restore the old settings."""
        before = self._settings
        self._take_settings(settings)
        with OnFailure(partial(self._take_settings, before)):
            yield

    def _renew(self) -> None:
        """Replace the operators in all workers by new operators that are created from the current settings."""
        if self.backend == "horovod":  # Horovod can be initialized only once per process
            self._controller.restart()
        else:
            self._controller.renew(self._runner_cls.renew, self._replicas.settings)

    def _checked_config(self, config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the config as a dictionary, or raise an error if this trainer cannot work with it."""
        return checks.check_config(config)

    # -------------------------------------------------------------------------------- code in the workers, and the end

    def apply_all_workers(self, fn: Callable[[], T]) -> list[T]:
        """Run `fn()` once in each worker process. Return the results in rank order."""
        # `fn` may change the workers' state, for example by setting a random seed.
        return self._on_all(replica_calls.execute, fn, changes_state=True, is_repeatable=False)

    def apply_all_operators(self, fn: Callable[[AnyOperatorT], T]) -> list[T]:
        """Run `fn(operator)` in all workers at the same time. Return the results in rank order.

        If `fn` raises an error on only some workers, or at different lines, all workers are replaced, because their
        operators may no longer be in sync.
        """
        return self._on_all(replica_calls.apply, fn, changes_state=True, keeps_alike=True, is_repeatable=False)

    def get_local_operator(self) -> AnyOperatorT:
        """Return the live operator of rank 0. Needs `use_local=True`.

        Raises:
            NotImplementedError: All workers are remote.
        """
        runner = self._controller.ensure_group().local_replica
        if runner is None:
            raise NotImplementedError(
                "The operators live in other processes: use `apply_all_operators(fn)`, or create the trainer with "
                "`use_local=True`."
            )
        operator: AnyOperatorT = runner.operator
        return operator

    def shutdown(self, force: bool = False) -> None:
        """Shut down the workers and free their resources. A second call does nothing.

        If called from another thread, this also ends a running call, which then raises `TrainerShutdownError`.

        Args:
            force: Whether to kill the processes immediately instead of letting them close first.
        """
        try:
            self._finalizer.detach()
            self._saves.await_states()
            self._controller.stop(force)
            self._background.await_end()
            self._calls.stop_reporting()
        finally:
            self._writer.close()

    def _interrupt(self) -> None:
        """End the running call from another thread, as Ctrl-C does.

        If the driver is the only worker, do nothing.
        """
        if not self._group_settings.is_driver_only:
            self._controller.turns.interrupt_running()

    def __enter__(self: TrainerT) -> TrainerT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(force=error is not None)

    def status(self) -> TrainerStatus:
        """Return the trainer's status: workers, throughput, time breakdown, data, failures, last snapshot.

        The status prints as a few lines of text, and is displayed as a card in a notebook. Workers respond while they
        are training, so you can call this from a second thread while `train` runs.
        """
        found = self._calls.with_ledger(self._controller.status(self._calls.samples_per_s))
        return replace(found, global_batch=self._global_batch_in_words)

    @property
    def _global_batch_in_words(self) -> str:
        """Description of the global batch if its size depends on the number of workers. Otherwise, an empty string."""
        facts = self._facts
        if facts.keeps_global_batch or facts.batch_size is None or self.max_replicas == 1:
            return ""
        return global_batch_in_words(self.num_workers, facts.batch_size, self._keeps_survivors)

    def ledger(self) -> TimeLedger:
        """Return how each worker spent its time, up to the last time the worker reported its progress.

        This does not contact the workers. For up-to-date figures, use `status().ledger`. The ledger's notes say which
        figures are missing.
        """
        controller = self._controller
        return self._calls.accounts.ledger(None if controller.is_stopped else controller.num_workers)

    def __repr__(self) -> str:
        """Return a one-line description of the trainer, without contacting the workers."""
        try:
            return f"<{self._title}: {self._in_words()}>"
        except AttributeError:  # the trainer failed to start
            return f"<{type(self).__name__}: not started>"

    def _repr_html_(self) -> str:
        if self._controller.is_stopped:
            return card(self._title, note=self._in_words())
        return self.status().as_card(self._title)

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} of {self.training_operator_cls.__name__}"

    def _in_words(self) -> str:
        most = readable.counted(self.max_replicas, "worker")
        told = ["shut down" if self._controller.is_stopped else f"{self.num_workers} of {most}"]
        if self.history.records:
            told.append(f"epoch {self.history.records[-1].epoch}")
        return ", ".join([*told, self.backend, *readable.failures(self.history.events)])

    def _snapshot(self) -> Snapshot:
        """Return a snapshot, a copy of the current training state, when it has arrived in the driver."""
        if self.use_local:  # users can change the operator in the driver directly, so an earlier copy may be outdated
            self._controller.snapshots.touch()
        return self._controller.snapshot()

    def _newest_snapshot(self) -> NewestSnapshot:
        """Return a handle to a snapshot of the current training state, as soon as the workers have copied their state.

        The snapshot may still be on its way to the driver.
        """
        if self.use_local:
            self._controller.snapshots.touch()
        return self._controller.newest_snapshot()

    def _shared_snapshot(self) -> Snapshot:
        """Return a snapshot of the current state that all workers share, such as the model's weights.

        To avoid another copy, the states of the workers' random number generators may be slightly older.
        """
        landed = self._controller.landed_snapshot() if not self.use_local else None
        return self._snapshot() if landed is None else landed

    @property
    def config(self) -> dict[str, Any]:
        """Read-only copy of the config.

        Its `BATCH_SIZE` is the actual size of the global batch with the current number of workers.
        """
        config = dict(self._settings.config)
        if BATCH_SIZE in config:
            options = self._settings.batch_options
            config[BATCH_SIZE] = options.global_size(config[BATCH_SIZE], self._controller.num_workers)
        return ReadOnlyConfig(config)

    @property
    def max_replicas(self) -> int:
        """Maximum number of workers, which is the requested number."""
        return self._group_settings.num_workers

    @property
    def num_workers(self) -> int:
        """Current number of workers."""
        return self._controller.num_workers

    @property
    def worker_group(self) -> Any:
        """The running worker group, started again if it has ended. Raises `RuntimeError` after `shutdown`."""
        return self._controller.ensure_group()

    @property
    def _facts(self) -> Any:
        """What rank 0 reported after `setup`, such as the number of models.

        Other ranks may have reported other data, but are the same otherwise.
        """
        return self._controller.facts[0]

    @property
    def _num_failures(self) -> int:
        return self._controller.history.num_failures

    @property
    def _last_resize(self) -> float:
        return self._controller.history.last_resize

    def _check_same_data(self) -> None:
        """Raise an error if the workers registered different datasets.

        Each worker takes its shard of the dataset that it registered itself. Shards of different datasets could overlap
        unnoticed.
        """
        for name in ("train_data", "validation_data"):
            found = [getattr(facts, name) for facts in self._controller.facts]
            if len(set(found)) > 1:
                self.shutdown(force=True)
                raise ValueError(
                    f"The workers registered different {name.replace('_', ' ')}: {found}. The library divides one "
                    "dataset that all workers have alike. If each worker loads its own part, "
                    f"{self._divide_by_hand}."
                )


def _abandon(controller: ElasticController, background: BackgroundCalls) -> None:
    """Stop the workers of a trainer that the user never shut down.

    Called when the trainer is garbage-collected, or when the program ends.
    """
    controller.stop(force=True)
    background.await_end()


def show_options(trainer: object, *settings: Any) -> None:
    """Set every option as an attribute of the trainer, so that users can read it.

    An option is left out if the trainer's class has an attribute of the same name.

    Args:
        trainer: The trainer.
        *settings: Dataclass objects whose fields are the options.
    """
    for each in settings:
        names = [field.name for field in fields(each) if not hasattr(type(trainer), field.name)]
        vars(trainer).update({name: getattr(each, name) for name in names})
