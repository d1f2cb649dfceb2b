"""`ClassTrainer`: the common base class of `TorchTrainer` and `TFTrainer`, with the methods that programs call.

A trainer runs epochs, predictions and functions on the training operators in all workers. This module checks the
arguments of its methods. Other modules do the work:

- `life`: `TrainerLife` starts the workers, holds the trainer's settings, and ends the workers.
- `calls`: `TrainerCalls` trains, validates and tests, and `outputs_in_rounds` predicts.
- `live_changes` changes the config, the operator class or the callbacks of running workers.
- `fit_loop`: `FitRun` runs `fit` and `epochs`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from raysgd.callbacks.callback import Callback
from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core import arguments as checks
from raysgd.core.cluster.keeper import Keeper
from raysgd.core.config_keys import BATCH_SIZE
from raysgd.core.engine.shared.interface import CallHandle
from raysgd.core.history import readable
from raysgd.core.history.history import History
from raysgd.core.history.status import TrainerStatus
from raysgd.core.numbers.results import Metrics
from raysgd.core.numbers.timing import TimeLedger
from raysgd.core.text.cards import card
from raysgd.core.text.tracebacks import hide_library_frames
from raysgd.exceptions import NoDataError
from raysgd.trainer.configuration import GroupSettings, Recovery, ReplicaSettings
from raysgd.trainer.driver import live_changes
from raysgd.trainer.driver.calls import TrainerCalls, epoch_options, outputs_in_rounds, usual_batch_size
from raysgd.trainer.driver.detachable import Detachable
from raysgd.trainer.driver.fit_loop import FitOptions, FitRun
from raysgd.trainer.driver.life import Framework, NoteProgress, TrainerLife
from raysgd.trainer.driver.live_changes import ReadOnlyConfig
from raysgd.trainer.messages import epochs
from raysgd.trainer.messages.prediction import BatchRequest

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from raysgd.trainer.driver.kept_trainer import KeptTrainer

    AnyOperatorT = TypeVar("AnyOperatorT", default=Any)
else:
    from typing import TypeVar  # does not support `default` before Python 3.13

    AnyOperatorT = TypeVar("AnyOperatorT")

T = TypeVar("T")
TrainerT = TypeVar("TrainerT", bound="ClassTrainer[Any]")


@hide_library_frames
class ClassTrainer(Detachable, ABC, Generic[AnyOperatorT]):
    """Base class of the trainers, which control training operators in several workers from the driver process.

    Each worker has a replica: an object that holds the worker's training operator in its attribute `operator`.
    """

    initialization_hook: Callable[[], Any] | None
    num_cpus_per_worker: float
    use_gpu: bool
    backend: str
    timeout_s: float
    use_local: bool
    min_workers: int
    spare_workers: int
    recovery: Recovery
    _running_fit: weakref.ref[Any] | None = None
    """Reference to the iterator over the epochs of the last `fit`."""

    def __init__(
        self, group: GroupSettings, settings: ReplicaSettings, framework: Framework, has_chosen_batches: bool
    ) -> None:
        show_options(self, group, settings, settings.batch_options)
        self._life = TrainerLife(group, settings, framework, type(self).__name__, has_chosen_batches)
        self._calls = TrainerCalls(self._life)
        self._life.start()

    @property
    def training_operator_cls(self) -> type[AnyOperatorT]:
        """The operator class. `reload` changes it."""
        return self._life.settings.training_operator_cls

    def _kept_by(self, keeper: Keeper, left_file: str | None, note_fit: NoteProgress | None) -> KeptTrainer:
        from raysgd.trainer.driver.kept_trainer import KeptTrainer  # imported here: only detached trainers need it

        self._life.left_file, self._life.note_fit = left_file, note_fit
        return KeptTrainer(self._life, keeper, self.save)

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
            A dict with `num_samples`, `epoch` and `batch_count`. For each metric, the dict also has the mean over all
            samples, and the last value as `last_<name>`.
            With creator functions, `train_<name>` is the last value of each entry in Keras's history.

        Raises:
            InvalidCountError: `max_retries` is negative, or `num_steps` is not a valid count.
            ValueError: This was called while `fit` is running, for example by a callback.
            WorkerError: Your code raised an error. The `WorkerError` is also an instance of that error's class. The
                call is not retried.
            WorkersLostError: Workers were lost and no retries are left.
        """
        self._refuse_inside_fit("train")
        checks.check_max_retries(max_retries)
        options = epoch_options(num_steps, profile, reduce_results, info)
        if dataset is not None:
            self._life.framework.check_dataset(self._life, dataset, training=True)
        checks.refuse_text(blocking=blocking)
        work = partial(self._calls.train, options, max_retries, dataset, reduce_results)
        return work() if blocking else self._life.begin_in_background(work)

    def _refuse_inside_fit(self, method: str) -> None:
        epochs = None if self._running_fit is None else self._running_fit()
        if epochs is not None and epochs.gi_running:
            raise ValueError(
                f"`{method}` was called while `fit` runs, as in a callback, and would change its epochs. Call it after "
                "`fit`, or between two epochs: `for row in trainer.epochs(n): ...`"
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
        options = epoch_options(num_steps, profile, reduce_results, info)
        if dataset is not None:
            self._life.framework.check_dataset(self._life, dataset, training=False)
        checks.refuse_text(blocking=blocking)
        work = partial(self._calls.validate, options, dataset, reduce_results)
        if blocking:
            return work()
        if dataset is None and not self._life.facts.has_validation:
            raise NoDataError(
                "`validate(blocking=False)` has nothing to validate on: register validation data in `setup`, or pass "
                "`dataset`."
            )
        if self._calls.validates_beside:
            return self._calls.begin_validation(options, dataset, reduce_results)
        return self._life.begin_in_background(work)

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
            max_time: Time limit of this call: seconds, a `timedelta`, or a string such as "23:30:00" (hours, minutes,
                seconds) or "1-12:00:00" (1 day and 12 hours). The run stops at a step shortly before the limit and is
                saved if a callback saves. Time for two saves is reserved.
            callbacks: Instances of `raysgd.callbacks.Callback` or `WorkerCallback`, called in this order. Callbacks
                with `runs_last`, such as `Checkpointing`, are called after the others.
            validation_freq: Validate every `validation_freq` epochs; 0 for never. Without validation data, `fit`
                validates only if your class overrides `validate` with a method that needs no data.
            validate_every_n_steps: Also validate inside epochs, after every n-th step, counted over all epochs.
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
            log_every_n_steps: Pass training metrics to loggers and reports after every n-th step inside an epoch; 0 for
                epochs only. For `TorchTrainer`.

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
        fit = FitRun(self, self._calls, options)
        rows = fit.rows()
        self._running_fit = weakref.ref(rows)
        return fit.history, rows

    def test(self, dataset: Any) -> Metrics:
        """Evaluate on `dataset`, as `validate(dataset=...)` does. The names of the metrics start with `test_`."""
        self._life.framework.check_dataset(self._life, dataset, training=False)
        result: Metrics = self._calls.validate(epoch_options(None), dataset, kind="test")
        return result

    @property
    def history(self) -> History:
        """The trainer's history: all `train`, `validate` and `test` calls, and all lost and added workers."""
        return self._life.recorder.history

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
            has_target: Whether the last element of tuple batches is a target. The default `predict_batch` does not pass
                the target to the model. Default: True if the batches of a dataset, loader or iterator have several
                elements, or if you pass `raysgd.data.Arrays` with a tuple of several arrays. False for all other
                arrays.
            info: Values to add to `batch_info`.
            max_retries: How many times to retry a round of batches, one for each worker, after a failure.

        Returns:
            The predictions, in the same type of container as `data`; see `docs/predict.md`. Arrays without rows are
            predicted as one empty batch.

        Raises:
            TypeError: The type of the data is not supported.
            ValueError: The order of the data cannot be preserved, a column is missing, or an output has a different
                number of rows than its batch.
            KeyError: A data frame lacks one of the `feature_columns`.
            WorkerError: The operator raised an error. The `WorkerError` is also an instance of that error's class. The
                call is not retried.
            WorkersLostError: Workers were lost and no retries are left.
        """
        checks.refuse_text(streaming=streaming)
        if has_target is not None and not isinstance(has_target, bool):
            raise ValueError(f"`has_target={has_target!r}`: need True, False or None.")
        checks.check_max_retries(max_retries)
        info = checks.check_info(info)
        usual = usual_batch_size(self._life.settings, self.num_workers) if batch_size is None else batch_size
        size = checks.check_count("batch_size", usual, "It is the number of rows in a batch.")
        asked = BatchRequest(size, batch_size is not None, feature_columns)
        source = self._life.framework.to_predict(data, asked)
        outputs = outputs_in_rounds(self._life, source, info, has_target, max_retries)
        return source.container.stream(outputs) if streaming else source.container.collect(outputs)

    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        """Load a state dict into all workers. Return once all workers have loaded it.

        Args:
            state_dict: The result of `state_dict`, from this or another trainer with any number of workers.
            blocking: Accepted for compatibility. Loading always blocks, so that no error goes unnoticed.

        Raises:
            ValueError: A part of the state is missing or does not fit the registered objects. The workers keep their
                old state.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"`load_state_dict` got `{type(state_dict).__name__}`: need what `state_dict` returns, a dict."
            )
        self._life.framework.load_state(self._life, dict(state_dict))

    # ----------------------------------------------------------------------------------------- changes in live workers

    def reset_config(self, config: Mapping[str, Any] | None = None) -> None:
        """Start over with a new config, as a new trainer would: create new operators in the same worker processes.

        With Horovod, the processes are new as well. The trained state is lost, so `save` it first if you need it.
        Random generators are reseeded only if the trainer has a `seed`.

        Args:
            config: The new config, as for a new trainer.

        Raises:
            ValueError, TypeError: The config is invalid. Nothing has changed.
            WorkerError: Your `setup` raised an error. The `WorkerError` is also an instance of that error's class. The
                workers were shut down, and the next call starts new workers with the new config.
        """
        live_changes.begin_again(self._life, config)

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
            WorkerError: `config_changed` raised an error. The `WorkerError` is also an instance of that error's class.
                All workers keep the old config.
        """
        live_changes.change_config(self._life, changes)

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
            WorkerError: `setup` of the new class raised an error. The `WorkerError` is also an instance of that error's
                class. All workers keep the old class.
        """
        self._life.framework.check_reload(self._life, training_operator_cls)
        live_changes.reload(self._life, training_operator_cls)

    def take_state_of(self, other: Any) -> None:
        """Load the state of another live trainer, without a file.

        If the configs differ, the optimizers keep the hyperparameters that this trainer's `setup` chose, and schedules
        are rescaled to a new learning rate.

        Args:
            other: A trainer of the same class with the same type of operators, and any number of workers.

        Raises:
            TypeError: `other` is not a trainer of this class.
            ValueError: The state does not fit, and the workers keep their old state. Or the workers have
                loaded the state of `other`, but a schedule cannot be rescaled to the config's learning rate.
        """
        own_cls = self._life.framework.runner_cls
        if not isinstance(other, ClassTrainer) or other._life.framework.runner_cls is not own_cls:
            raise TypeError(
                f"`take_state_of` got a `{type(other).__name__}`: need a trainer of the same kind, a "
                f"`{type(self).__name__}`."
            )
        self._life.framework.load_snapshot(self._life, other._life.shared_snapshot())
        if dict(other.config) != dict(self.config):
            self._follow_config()

    def _follow_config(self) -> None:
        """In all workers, set the hyperparameters of the optimizers back to the values that `setup` chose.

        Called after the state of a trainer with another config was loaded.
        """
        self._life.on_all(self._life.framework.runner_cls.follow_config, changes_state=True, keeps_alike=True)

    # -------------------------------------------------------------------------------- code in the workers, and the end

    def apply_all_workers(self, fn: Callable[[], T]) -> list[T]:
        """Run `fn()` once in each worker process. Return the results in rank order."""
        # `fn` may change the workers' state, for example by setting a random seed.
        return self._life.on_all(epochs.execute, fn, changes_state=True, is_repeatable=False)

    def apply_all_operators(self, fn: Callable[[AnyOperatorT], T]) -> list[T]:
        """Run `fn(operator)` in all workers at the same time. Return the results in rank order.

        If `fn` raises an error on only some workers, or at different lines, all workers are replaced, because their
        operators may no longer be in sync.
        """
        return self._life.on_all(epochs.apply, fn, changes_state=True, keeps_alike=True, is_repeatable=False)

    def get_local_operator(self) -> AnyOperatorT:
        """Return the live operator of rank 0. Needs `use_local=True`.

        Raises:
            NotImplementedError: All workers are remote.
        """
        runner = self._life.controller.ensure_group().local_replica
        if runner is None:
            raise NotImplementedError(
                "The operators live in other processes: use `apply_all_operators(fn)`, or create the trainer with "
                "`use_local=True`."
            )
        return runner.operator

    def shutdown(self, force: bool = False) -> None:
        """Shut down the workers and free their resources. A second call does nothing.

        If called from another thread, this also ends a running call, which then raises `TrainerShutdownError`.

        Args:
            force: Whether to kill the processes immediately instead of letting them close first.
        """
        self._life.end(force)

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
        return replace(self._life.figures.status(), global_batch=self._life.global_batch_in_words)

    def ledger(self) -> TimeLedger:
        """Return how each worker spent its time, up to the last time the worker reported its progress.

        This does not contact the workers. For up-to-date figures, use `status().ledger`. The ledger's notes say which
        figures are missing.
        """
        controller = self._life.controller
        return self._life.figures.accounts.ledger(None if controller.stopped.is_set() else controller.num_workers)

    def __repr__(self) -> str:
        """Return a one-line description of the trainer, without contacting the workers."""
        try:
            return f"<{self._title}: {self._in_words()}>"
        except AttributeError:  # the trainer failed to start
            return f"<{type(self).__name__}: not started>"

    def _repr_html_(self) -> str:
        if self._life.controller.stopped.is_set():
            return card(self._title, note=self._in_words())
        return self.status().as_card(self._title)

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} of {self.training_operator_cls.__name__}"

    def _in_words(self) -> str:
        most = readable.counted(self.max_replicas, "worker")
        parts = ["shut down" if self._life.controller.stopped.is_set() else f"{self.num_workers} of {most}"]
        if self.history.records:
            parts.append(f"epoch {self.history.records[-1].epoch}")
        return ", ".join([*parts, self.backend, *readable.failures(self.history.events)])

    @property
    def config(self) -> dict[str, Any]:
        """Read-only copy of the config.

        Its `BATCH_SIZE` is the actual size of the global batch with the current number of workers.
        """
        config = dict(self._life.settings.config)
        if BATCH_SIZE in config:
            options = self._life.settings.batch_options
            config[BATCH_SIZE] = options.global_size(config[BATCH_SIZE], self._life.controller.num_workers)
        return ReadOnlyConfig(config)

    @property
    def max_replicas(self) -> int:
        """Maximum number of workers, which is the requested number."""
        return self._life.group_settings.num_workers

    @property
    def num_workers(self) -> int:
        """Current number of workers."""
        return self._life.controller.num_workers

    @property
    def worker_group(self) -> Any:
        """The running worker group, started again if it has ended. Raises `RuntimeError` after `shutdown`."""
        return self._life.controller.ensure_group()

    @property
    def _num_failures(self) -> int:
        return self._life.controller.history.num_failures

    @property
    def _last_resize(self) -> float:
        return self._life.controller.history.last_resize


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
