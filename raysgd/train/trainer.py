"""`Trainer`: runs a training function on N workers, and returns its reports and results.

`Trainer` is a front end: `FunctionWorkers` runs the workers, and the engine replaces lost workers. This module also
contains `TrainingIterator`, which iterates over reports, and `TrainWorkerGroup`, workers that hold a user's objects. A
run's callbacks are called in order. Callbacks that were notified of the run's start are also notified of its end, even
if the run or another callback fails.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from raysgd.air.config import CheckpointConfig, ScalingConfig
from raysgd.callbacks.callback import Callback
from raysgd.callbacks.calling import Dispatcher, FunctionCalls, as_list, own_among
from raysgd.compat.names import MOVED, former_names
from raysgd.core.arguments import check_hook, check_seconds, is_integer, refuse_unknown
from raysgd.core.cluster.ray_cluster import gpus_of_nodes
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.files import check_path
from raysgd.core.synonyms import callback_instead_of
from raysgd.core.text.tracebacks import hide_library_frames
from raysgd.exceptions import InactiveWorkerGroupError, OnFailure
from raysgd.storage import Folder, StorageError, open_folder
from raysgd.storage._store import make_new
from raysgd.storage.files import is_uri
from raysgd.train import constants
from raysgd.train._function_run import FunctionRun
from raysgd.train._worker.shards import check_dataset
from raysgd.train.backend import BackendConfig, resolve
from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.checkpoint import CheckpointStrategy, as_place, load_checkpoint
from raysgd.train.executor import RunsFunctions
from raysgd.train.utils import construct_path, without_arguments
from raysgd.train.worker_group import WorkerHandle
from raysgd.trainer.configuration import Placement
from raysgd.trainer.driver.detachable import Detachable
from raysgd.trainer.driver.leaving import Leaving

if TYPE_CHECKING:
    from raysgd.detached.protocol import Detached

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NOT_OF_TRIALS = {"backend", "logdir", "max_retries", "spare_workers", "detached", "unknown", "return"}
_RESERVED = constants.ALL_RESERVED_KEYS | constants.BASIC_AUTOFILLED_KEYS | constants.DETAILED_AUTOFILLED_KEYS
_OBSTACLE = (
    "`run.stop` cannot end a run of `raysgd.train.Trainer`: the function decides when it returns. Let it return, or "
    "use `TorchTrainer(train_loop_per_worker, run_config=RunConfig(callbacks=[...])).fit()` of `raysgd.train.torch`."
)


@hide_library_frames
class Trainer(RunsFunctions, Detachable):
    """Runs training functions on several workers, which stay alive from `start` to `shutdown`.

    Args:
        backend: How the workers are connected: "torch", "tensorflow", "horovod", or a config.
        num_workers: Number of workers, or a pair of the minimum and maximum. With a pair, the trainer starts as many
            workers as the free resources allow, continues with the remaining workers after a failure, and grows again
            after a checkpoint.
        use_gpu: True to give each worker a GPU. "auto" to go by the cluster: a GPU for each worker; if there are fewer
            GPUs, at most 4 workers share one; without GPUs, workers run on CPUs.
        resources_per_worker: Resources of each worker. "CPU" and "GPU" override the defaults; other names are custom
            resources.
        logdir: Parent of the run folders: a URI such as `s3://bucket/results`, or a path. A relative path is relative
            to `~/ray_results`. Default: a new folder in `~/ray_results`.
        max_retries: The number of the failure, counted from 1, that ends a run: 3 allows two restarts and raises the
            third failure as an error. -1 allows any number of failures.
        resize_interval_s: Seconds between two searches for free resources, if a run has fewer workers than the maximum.
            The run grows after a checkpoint.
        heartbeat_s: A worker process that does not respond for this many seconds, because it is stopped or frozen,
            counts as lost. A starting process gets at least 120 s.
        accelerator_type: The GPU model that workers need, by its name in Ray, such as "A100".
        placement_strategy: "PACK" puts workers on as few nodes as possible, "SPREAD" on as many as possible. None packs
            them, unless the environment variable TRAIN_ENABLE_WORKER_SPREAD is set.
        runtime_env: Ray runtime environment for the worker processes, but not for this process. Default: the job's
            runtime environment.
        elastic: True to let the remaining workers continue in the middle of the function after a failure, instead of
            restarting the function from its checkpoint. Works for PyTorch functions on gloo. The function must prepare
            its models, optimizers and loaders, the loaders with `exact=True`. Requires a pair as `num_workers`.
        spare_workers: Number of extra workers that are ready to replace lost workers in the middle of the function.
            They occupy resources. Requires `elastic=True`, and a function that counts its epochs by `loader.epoch`.
        detached: A name, or a `raysgd.Detached`, to let the trainer outlive this program. You then get a handle with
            the same methods. See `docs/detached.md`.

    Attributes:
        logdir: The trainer's folder, which contains the run folders: a path, or a `Folder` in a remote store.
        latest_run_dir: The folder of the latest run; None before the first run.

    Raises:
        ValueError, TypeError: An argument is invalid. Nothing was started.
        ModuleNotFoundError: The framework of the backend is not installed.

    Examples:
        >>> from raysgd import train
        >>> def train_func(config):
        ...     for epoch in range(config["num_epochs"]):
        ...         train.report(loss=1 / (epoch + 1))
        >>> trainer = Trainer("torch", num_workers=2)  # doctest: +SKIP
        >>> trainer.start()  # doctest: +SKIP
        >>> trainer.run(train_func, {"num_epochs": 3})  # doctest: +SKIP
        >>> trainer.shutdown()  # doctest: +SKIP
    """

    def __init__(
        self,
        backend: str | BackendConfig,
        num_workers: int | tuple[int, int] = 1,
        use_gpu: bool | Literal["auto"] = False,
        resources_per_worker: Mapping[str, float] | None = None,
        logdir: str | Path | None = None,
        max_retries: int = 3,
        *,
        resize_interval_s: float = 60.0,
        heartbeat_s: float = 60.0,
        accelerator_type: str | None = None,
        placement_strategy: Literal["PACK", "SPREAD"] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        elastic: bool = False,
        spare_workers: int = 0,
        detached: str | Detached | None = None,
        **unknown: NoReturn,
    ) -> None:
        given, names = locals(), Trainer.__init__.__annotations__
        refuse_unknown("Trainer", unknown, names)
        if logdir is not None:
            check_logdir(logdir)
        if not is_integer(max_retries):
            raise TypeError(f"`max_retries={max_retries!r}`: need an integer; -1 for any number.")
        check_seconds("resize_interval_s", resize_interval_s)
        resources: Any = {} if resources_per_worker is None else resources_per_worker
        self._config = resolve(backend)
        scaling = ScalingConfig(
            num_workers=num_workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": 1, **resources} if isinstance(resources, Mapping) else resources,
            elastic_resize_monitor_interval_s=resize_interval_s,
            accelerator_type=accelerator_type,
            elastic=elastic,
            spare_workers=spare_workers,
        ).with_gpus_chosen(self._config.view_of_driver())
        placement = Placement(scaling.additional_resources_per_worker, None, placement_strategy, runtime_env)
        self._use_gpu = scaling.use_gpu
        super().__init__(self._config, scaling, max_retries, heartbeat_s, placement)
        options = {name: given[name] for name in names.keys() - _NOT_OF_TRIALS}
        self._make_alike = partial(Trainer, self._config, **options)
        self._bundles = [{"CPU": 1.0}, *[self._workers.spec.resources.bundle()] * self._workers.max_workers]
        self._strategy = "PACK" if self._workers.spec.packs else "SPREAD"
        self.logdir: Path | Folder = self.create_logdir(logdir)
        self.latest_run_dir: Path | Folder | None = None
        self._num_runs = 0

    def start(self, initialization_hook: Callable[[], Any] | None = None) -> None:
        """Start the workers and connect them.

        Args:
            initialization_hook: Called in each worker process before anything else, also in workers that replace lost
                workers.

        Raises:
            RuntimeError: The workers have already started.
            ReservationTimeoutError: The cluster did not grant the resources. This is also a `TimeoutError`.
            WorkerError: The hook raised. The error is also an instance of the class that was raised.
            WorkersLostError: Too many workers died while starting. This is also a `RuntimeError`.
        """
        check_hook(initialization_hook)
        self._workers.start(self, initialization_hook)
        if not self._use_gpu and (num_gpus := sum(gpus_of_nodes())):
            logger.info("the cluster has %g GPUs, of which none is used: pass `use_gpu=True` to use them", num_gpus)

    def shutdown(self) -> None:
        """Stop the workers. You can start new workers with `start` later."""
        self._workers.stop()

    def run(
        self,
        train_func: Callable[..., T],
        config: Any = None,
        callbacks: Sequence[TrainingCallback | Callback] | None = None,
        dataset: Any = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | CheckpointConfig | None = None,
    ) -> list[T]:
        """Run a function on all workers until it has finished on all of them.

        Args:
            train_func: The function. It takes either no argument or the config.
            config: The argument, passed unchanged; None for an empty dict. It can be any object that pickles.
            callbacks: Called at the start, at each report, and at the end: first `raysgd.train` callbacks, in list
                order, then `raysgd.callbacks` callbacks.
            dataset: Data to shard across the workers: a stream, an object with `split(n, equal=True)`, or a dict of
                these. See `get_dataset_shard`.
            checkpoint: The checkpoint that `load_checkpoint` returns at first: a dict, or the path or URI of a saved
                checkpoint.
            checkpoint_strategy: Decides which checkpoints stay on disk; may be a `CheckpointConfig`. Default: all.

        Returns:
            The return values of the function, by rank.

        Raises:
            RuntimeError: The trainer was not started, or another run is active.
            ValueError: The function takes more than one argument, or the checkpoint does not exist. Nothing was
                started, and no folder was created.
            TypeError: An argument has the wrong type. Nothing was started, and no folder was created.
            WorkerError: The function raised. The error is also an instance of the class that was raised. Not retried.
            StepMismatchError: The workers did not make the same calls of `report` and `save_checkpoint`. This is also a
                `RuntimeError`.
            WorkersLostError: Workers were lost too often. This is also a `RuntimeError`.
            CallbackError: A `raysgd.callbacks` callback failed. An error of a `raysgd.train` callback is raised
                unchanged.
            Preempted: SIGTERM or SIGUSR1 arrived. The run ends at the function's next checkpoint, or 30 s after the
                signal. The newest checkpoint is stored.
        """
        calls, leaving = TrainerCallbacks(callbacks), Leaving()
        start = self._checked(train_func, config, dataset, checkpoint, checkpoint_strategy)
        run_dir = self.create_run_dir()
        with leaving.listening(self._workers.expect_end):  # after the workers start, because Ray sets handlers then
            with calls.around(run_dir, config):
                iterator = TrainingIterator(start(run_dir, leaving=leaving))
                with OnFailure(self._workers.abort):
                    for results in iterator:
                        newest = self.latest_checkpoint_path if calls.are_told_of_checkpoints else None
                        calls.process(results, self.history.events, None if newest is None else str(newest))
            if leaving.is_due():  # the functions have finished, but a signal has asked the program to end
                leaving.end_program(self._checkpoints.keep_newest())
        return iterator.get_final_results() or []

    def run_iterator(
        self,
        train_func: Callable[..., Any],
        config: Any = None,
        dataset: Any = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | CheckpointConfig | None = None,
    ) -> TrainingIterator:
        """Start a function on all workers, and return an iterator over its reports.

        The arguments are those of `run`, without `callbacks`. `run` also lists the errors, of which `CallbackError` and
        `Preempted` are not raised here.
        """
        start = self._checked(train_func, config, dataset, checkpoint, checkpoint_strategy)
        return TrainingIterator(start(self.create_run_dir()))

    def to_worker_group(self, train_cls: type[Any], *args: Any, **kwargs: Any) -> TrainWorkerGroup:
        """Start and connect the workers, and create an object of your class in each worker.

        Args:
            train_cls: The class.
            args: Positional arguments for the class.
            kwargs: Keyword arguments for the class.

        Raises:
            RuntimeError: The trainer has already started.
            ReservationTimeoutError, WorkersLostError: As in `start`.
            WorkerError: The class raised. The error is also an instance of the class that was raised.
        """
        if self._workers.is_started:
            raise RuntimeError("The trainer has already started: `to_worker_group` starts its own workers.")
        make: Callable[..., Any] = train_cls
        self._workers.start(self, make_object=partial(make, *args, **kwargs))
        return TrainWorkerGroup(self)

    def to_tune_trainable(self, train_func: Callable[..., Any], dataset: Any = None) -> type[Any]:
        """Return a trainable for `ray.tune`. Each trial runs the function with its own trainer and config.

        A trial passes each report of rank 0 to Tune. With each report, and at the end, the trial also passes the newest
        checkpoint, unless Tune already has it. Of several checkpoints between two reports, Tune gets only the last. A
        trial uses the default `max_retries`, no spare workers, and a subfolder of the trial's folder as `logdir`.

        Args:
            train_func: The function.
            dataset: Data to shard across each trial's workers.

        Raises:
            RuntimeError: The trainer has already started.
            MissingTuneError: Ray Tune is not installed. This is also an `ImportError` and a `ValueError`.
        """
        from raysgd.train._tune import make_trainable

        if self._workers.is_started:
            raise RuntimeError("The trainer has already started: every trial starts its own workers.")
        without_arguments(train_func, None)
        check_dataset(dataset)
        return make_trainable(self._make_alike, train_func, dataset, self._bundles, self._strategy)

    def create_logdir(self, log_dir: str | Path | None) -> Path | Folder:
        """Create the folder that will contain the run folders, and return it.

        Without `log_dir`, the folder is in `~/ray_results`, and its name contains the current time.
        """
        return make_logdir(log_dir)

    def create_run_dir(self) -> Path | Folder:
        """Create the folder of the next run and return it. Its name contains the next free number."""
        self._num_runs, run_dir = make_run_dir(self.logdir, self._num_runs + 1)
        self.latest_run_dir = run_dir
        return run_dir

    @property
    def best_checkpoint_path(self) -> Path | str | None:
        """The path or URI of the latest run's best checkpoint file; None if the run has no file.

        `CheckpointStrategy` determines which checkpoint is best.
        """
        return self._checkpoints.best_checkpoint_path

    @property
    def best_checkpoint(self) -> dict[str, Any] | None:
        """The content of the latest run's best checkpoint file; None if the run has no file."""
        return load_checkpoint(self.best_checkpoint_path)

    @staticmethod
    def load_checkpoint_from_path(checkpoint_file_path: str | Path) -> dict[str, Any]:
        """Return the content of a checkpoint file.

        Raises:
            ValueError: The file does not exist.
        """
        checkpoint = load_checkpoint(checkpoint_file_path)
        if checkpoint is None:
            raise ValueError("`checkpoint_file_path=None`: need a path.")
        return checkpoint


@hide_library_frames
class TrainingIterator:
    """Iterates over the reports of a running training function.

    The function continues while you use a report, and waits in its next call to `report` until you request that report.
    """

    def __init__(self, run: FunctionRun) -> None:
        self._run = run
        self._is_finished = False

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """Return this object, because it is an iterator."""
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """Wait for the next report of all workers, and return their metrics by rank.

        With `elastic=True`, the list may lack workers that have just joined the group.
        """
        results = None if self._is_finished else self._finished_unless_fine(self._run.next_reports)
        if results is None:
            self._is_finished = True
            raise StopIteration
        return results

    def is_finished(self) -> bool:
        """Return True once the iterator has reached its end or has raised an error."""
        return self._is_finished

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Return the function's return values by rank, or None if the run was aborted.

        Args:
            force: If True and the function is still running, wait for the function to finish and discard its
                remaining reports. If False, return None until the iterator is exhausted.
        """
        if not self._is_finished and not force:
            logger.info("the function still runs: iterate to its end first, or use `get_final_results(force=True)`")
            return None
        if not self._is_finished:
            self._finished_unless_fine(self._run.finish)
            self._is_finished = True
        return self._run.returned

    def _finished_unless_fine(self, call: Callable[[], T]) -> T:
        self._is_finished = True
        if self._run.is_over and self._run.returned is None:
            raise InactiveWorkerGroupError(
                "The trainer was shut down, or began another run, after this iterator was created."
            )
        result = call()
        self._is_finished = False
        return result


@hide_library_frames
class TrainWorkerGroup:
    """Connected workers, each with an object of your class. `group[0].method.remote(...)` calls a method.

    If a worker dies, `ray.get` of a call to this worker raises Ray's `RayActorError`, and calls to other workers may
    wait forever for the dead worker. `restart` starts new workers. The state of the objects is lost unless the class
    saves it elsewhere.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer  # the workers end when the trainer is freed

    def __getitem__(self, index: int) -> WorkerHandle:
        return self._trainer._workers.ensure_workers().workers[index].actor

    def __len__(self) -> int:
        return len(self._trainer._workers.ensure_workers())

    def restart(self) -> None:
        """Replace all workers with new processes, connect them, and create new objects from the same arguments.

        Earlier handles no longer work: get new handles with `group[0]`.

        Raises:
            InactiveWorkerGroupError: The group was shut down.
            WorkerError: The class raised. The error is also an instance of the class that was raised.
            WorkersLostError: The new workers died too, more often than `max_retries` allows.
        """
        self._trainer._workers.replace_workers()

    def shutdown(self, patience_s: float = 5) -> None:
        """Stop the workers. With `patience_s` above 0, they shut down cleanly; otherwise, they are killed."""
        self._trainer._workers.stop(patience_s)


class TrainerCallbacks:
    """The callbacks of one `Trainer` run: `raysgd.train` callbacks, and `raysgd.callbacks` callbacks.

    Raises:
        TypeError: An object in `callbacks` is not a callback.
    """

    def __init__(self, callbacks: Any) -> None:
        listed = as_list(callbacks)
        self._own = own_among(listed)
        self._calls: FunctionCalls | None = None
        self._newest: str | None = None
        self._of_trainer = Dispatcher((each for each in listed if not isinstance(each, Callback)), advice=None)
        for callback in self._of_trainer.callbacks:
            if isinstance(callback, type) or not hasattr(callback, "start_training"):
                raise TypeError(
                    f"`callbacks` has {callback!r}: need objects of subclasses of "
                    f"`raysgd.callbacks.Callback` or `raysgd.train.TrainingCallback`.{callback_instead_of(callback)}"
                )

    @property
    def are_told_of_checkpoints(self) -> bool:
        """True if any callback receives checkpoints.

        Only then does `run` wait at each report until the newest checkpoint is written.
        """
        return bool(self._own)

    @contextmanager
    def around(self, run_dir: Path | Folder, config: Any) -> Iterator[None]:
        """Notify the callbacks of the run's start before the block, and of its end after the block.

        If the run's folder is in a remote store, callbacks get a local folder, which is uploaded at the end.
        """
        if not self._of_trainer.callbacks and not self._own:
            yield
            return
        with local_run_dir(run_dir) as local:
            failure: BaseException | None = None
            self._calls = FunctionCalls(self._own, "train", config, local, _OBSTACLE)
            try:
                self._of_trainer.on("start_training", logdir=str(local), config={} if config is None else config)
                self._calls.begin_run()
                yield
            except BaseException as error:  # also Ctrl-C, because callbacks are notified of what ended the run
                failure = error
                raise
            finally:
                if any(getattr(each, "reads_checkpoints", False) for each in self._of_trainer.callbacks):
                    fetch_checkpoints(run_dir, local)
                self._finish(self._calls, failure)

    def process(
        self, results: list[dict[str, Any]], events: Sequence[GroupEvent] = (), checkpoint: str | None = None
    ) -> None:
        """Pass a report to all callbacks, and a new checkpoint to the `raysgd.callbacks` callbacks.

        Args:
            results: The metrics of all workers.
            events: All events of the workers.
            checkpoint: Path or URI of the newest checkpoint; None without a checkpoint.
        """
        self._of_trainer.on("process_results", results)
        if self._calls is not None and self._own:
            own = {name: value for name, value in results[0].items() if name not in _RESERVED}
            self._calls.report(own, events)
            if checkpoint is not None and checkpoint != self._newest:
                self._newest = checkpoint
                self._calls.tell("on_checkpoint", checkpoint)

    def _finish(self, calls: FunctionCalls, failure: BaseException | None) -> None:
        has_failed = failure is not None
        with OnFailure(with_error=calls.end_run):
            self._of_trainer.finish(["finish_training"], error=has_failed, has_failed=has_failed)
        calls.end_run(failure)


# ------------------------------------------------------------------------------------------------------------- folders


def check_logdir(logdir: Any) -> None:
    """Check that `logdir` is a local folder or a folder's URI, without connecting to anything.

    Raises:
        TypeError: `logdir` is neither a string nor a path.
        ValueError: `logdir` is empty, or its scheme is unknown.
        ModuleNotFoundError: A package that the URI needs is missing.
    """
    if is_uri(logdir):
        open_folder(logdir, argument="logdir")
    else:
        check_path("logdir", logdir)


def make_logdir(log_dir: str | Path | None) -> Path | Folder:
    """Create a trainer's folder and return it. Without `log_dir`, the folder is named after the current time.

    Raises:
        StorageError: The store could not be reached.
    """
    if log_dir is None:
        folder = make_new(open_folder(_results()), time.strftime("train_%Y-%m-%d_%H-%M-%S"))
    else:
        check_logdir(log_dir)
        folder = open_folder(log_dir if is_uri(log_dir) else construct_path(log_dir, constants.DEFAULT_RESULTS_DIR))
        folder.make()
    logger.info("the results of this trainer go to %s", as_place(folder))
    return as_place(folder)


def make_run_dir(logdir: Path | Folder, number: int) -> tuple[int, Path | Folder]:
    """Create a run's folder with the lowest free number that is at least `number`. Return the number and the folder.

    A number is free if its folder does not exist yet.
    """
    while not _is_new(run_dir := logdir / f"run_{number:03d}"):
        number += 1
    return number, run_dir


def _is_new(run_dir: Path | Folder) -> bool:
    """Create a run's folder and return True. Return False if the folder already exists.

    In a remote store, checking and creating are two steps, so two programs at the same time may both get True.
    """
    if isinstance(run_dir, Folder):
        is_there = run_dir.exists()
        run_dir.make()
        return not is_there
    try:
        run_dir.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


@contextmanager
def local_run_dir(run_dir: Path | Folder) -> Iterator[Path]:
    """Yield a local folder for the files that callbacks write during a run.

    If the run's folder is in a remote store, upload the files at the end of the run. If the run has failed, an error of
    the upload is only logged.

    Raises:
        StorageError: The upload failed. The message names the local folder that still holds the files.
    """
    if isinstance(run_dir, Path):
        yield run_dir
        return
    local = Path(tempfile.mkdtemp(prefix=f"{run_dir.name}-", dir=_results()))
    logger.info("callbacks write to %s; this folder is uploaded to %s when the run ends", local, run_dir)

    has_failed = True
    try:
        yield local
        has_failed = False
    finally:
        # Do not upload the checkpoints, which `fetch_checkpoints` has downloaded from the store.
        shutil.rmtree(local / constants.TRAIN_CHECKPOINT_SUBDIR, ignore_errors=True)
        try:
            run_dir.upload(local)
        except StorageError as error:
            text = f"{error} The files of the callbacks are still in `{local}`."
            if not has_failed:
                raise StorageError(text) from error
            logger.error("%s", text)  # the error that ended the run is raised


def fetch_checkpoints(run_dir: Path | Folder, local: Path) -> None:
    """Download a run's checkpoints from a remote store to the local folder in which callbacks look for them.

    Do nothing if the run's folder is on disk. If the store cannot be reached, log the error.
    """
    if isinstance(run_dir, Path):
        return
    try:
        (run_dir / constants.TRAIN_CHECKPOINT_SUBDIR).download(local / constants.TRAIN_CHECKPOINT_SUBDIR)
    except FileNotFoundError:  # the run saved no checkpoints
        pass
    except StorageError as error:
        logger.error("could not download the run's checkpoints for the callbacks: %s", error)


def _results() -> Path:
    folder = Path(constants.DEFAULT_RESULTS_DIR).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


former_names(__name__)

__all__ = ["Trainer", "TrainWorkerGroup", "TrainingIterator", *MOVED[__name__]]
