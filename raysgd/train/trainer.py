"""`Trainer`: runs a training function on N workers, and hands on what it reports.

A front end: it checks arguments, keeps the folders, and calls the callbacks. Workers and their losses are the business
of the executor and the engine below it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from raysgd._checks import check_amount, is_integer, refuse_text
from raysgd._paths import check_path
from raysgd.compat.names import MOVED, former_names
from raysgd.engine.history import History
from raysgd.engine.resources import cluster_view
from raysgd.exceptions import InactiveWorkerGroupError
from raysgd.train import constants
from raysgd.train._plan import RunPlan
from raysgd.train._shards import check_dataset
from raysgd.train.backend import BackendConfig, resolve
from raysgd.train.callbacks.callback import TrainingCallback, call_with_known
from raysgd.train.checkpoint import CheckpointManager, CheckpointStrategy, load_checkpoint
from raysgd.train.executor import BackendExecutor, Flag, as_range
from raysgd.train.utils import construct_path, without_arguments
from raysgd.train.worker_group import WorkerGroup, WorkerHandle

logger = logging.getLogger(__name__)


class Trainer:
    """Runs training functions on workers that it keeps alive from `start` to `shutdown`.

    Args:
        backend: How the workers are connected: "torch", "tensorflow", "horovod", or a config.
        num_workers: How many; or a pair, the smallest and the largest number: the trainer then begins with as many as
            there is room for, goes on with what is left after a loss, and grows back after a checkpoint.
        use_gpu: Whether each worker gets a GPU.
        resources_per_worker: Other amounts for each worker than one "CPU" and that "GPU"; other names are custom
            resources.
        logdir: Where runs put their folders; a relative path is under `~/ray_results`. Default: a new folder there.
        max_retries: The loss of workers with this number in a run is the one that is raised: 3 allows two. -1 allows
            any number.
        resize_check_s: How often a run on fewer workers than it might have looks for room; it grows after a checkpoint.
        heartbeat_s: A worker process that gives no sign of life for so long, because it is stopped or frozen, is lost;
            while it is made ready it gets at least 10 s.

    Raises:
        ValueError, TypeError: An argument is wrong. Nothing was started.
        ModuleNotFoundError: The framework of the backend is not installed.

    Example:
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
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        logdir: str | Path | None = None,
        max_retries: int = 3,
        *,
        resize_check_s: float = 60.0,
        heartbeat_s: float = 60.0,
    ) -> None:
        as_range(num_workers)
        if logdir is not None:
            check_path("logdir", logdir)
        refuse_text(use_gpu=use_gpu)
        if not is_integer(max_retries):
            raise TypeError(f"`max_retries={max_retries!r}`: need an integer; -1 for any number.")
        num_cpus, num_gpus, custom = amounts_for_each(use_gpu, resources_per_worker)
        self._config = resolve(backend)
        self._num_workers = num_workers
        self._use_gpu = use_gpu
        self._resources_per_worker = dict(resources_per_worker or {})
        self._pace: dict[str, Any] = {"resize_check_s": resize_check_s, "heartbeat_s": heartbeat_s}
        self._executor = BackendExecutor(
            self._config,
            num_workers,
            num_cpus,
            num_gpus,
            custom,
            max_retries,
            **self._pace,
        )
        self._run_id = 0
        self.logdir = self.create_logdir(logdir)

    # ---------------------------------------------------------------------------------------------- start and end

    def start(self, initialization_hook: Callable[[], Any] | None = None) -> None:
        """Starts the workers and connects them.

        Args:
            initialization_hook: Run in each worker process before anything else, also in those that replace lost ones.

        Raises:
            RuntimeError: They were started already.
            ReservationTimeoutError: The cluster did not grant the resources; a `TimeoutError`.
            WorkerError: The hook raised; of that class too.
        """
        if initialization_hook is not None and not callable(initialization_hook):
            raise TypeError(f"`initialization_hook={initialization_hook!r}`: need a function without parameters.")
        self._executor.start(initialization_hook)
        num_gpus = 0 if self._use_gpu else sum(node.total.get("GPU", 0) for node in cluster_view().nodes)
        if num_gpus:
            logger.info("the cluster has %g GPUs, of which none is used: pass `use_gpu=True` to use them", num_gpus)

    def shutdown(self) -> None:
        """Ends the workers. The trainer can be started again."""
        self._executor.shutdown()

    @property
    def is_started(self) -> Flag:
        """Whether there are workers."""
        return self._executor.is_started

    @property
    def history(self) -> History:
        """What happened to the workers since `start`.

        Raises:
            InactiveWorkerGroupError: There are none.
        """
        return self._executor.history

    # ---------------------------------------------------------------------------------------------- runs

    def run(
        self,
        train_func: Callable[..., Any],
        config: Any = None,
        callbacks: Sequence[TrainingCallback] | None = None,
        dataset: Any = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> list[Any]:
        """Runs a function on all workers until it ends everywhere.

        Args:
            train_func: Takes nothing, or one argument, the config.
            config: That argument, as it is; an empty dict for None. It need not be a dict, but has to pickle.
            callbacks: Told of the start, of each report, and of the end, in this order.
            dataset: Divided over the workers, see `get_dataset_shard`: has `split(n, equal=True)`; or a dict of such.
            checkpoint: What `load_checkpoint` returns at first: a dict, or the path of a saved one.
            checkpoint_strategy: Which checkpoints stay on disk. Default: all.

        Returns:
            What the function returned, by rank.

        Raises:
            RuntimeError: The trainer was not started, or a run is going on.
            ValueError: The function takes more than one argument; there is no such checkpoint.
            TypeError: An argument is of the wrong kind. Like with a `ValueError` nothing was started, no folder made.
            WorkerError: The function raised; of that class too. Never retried.
            StepMismatchError: The functions were out of step; a `RuntimeError`.
            WorkersLostError: Workers were lost too often; a `RuntimeError`.
        """
        callbacks = _checked_callbacks(callbacks)
        plan = RunPlan.checked(train_func, config, dataset, checkpoint, checkpoint_strategy)
        self._executor.check_free()
        run_dir = self.create_run_dir()
        with _told(callbacks):
            for callback in callbacks:
                call_with_known(callback.start_training, logdir=str(run_dir), config={} if config is None else config)
            iterator = self._iterate(plan, run_dir)
            try:
                for results in iterator:
                    for callback in callbacks:
                        callback.process_results(results)
            except BaseException:
                self._executor.abort_training()
                raise
        returned: list[Any] = iterator.get_final_results() or []
        return returned

    def run_iterator(
        self,
        train_func: Callable[..., Any],
        config: Any = None,
        dataset: Any = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> TrainingIterator:
        """Starts a function on all workers and returns an iterator over what it reports; arguments as in `run`."""
        plan = RunPlan.checked(train_func, config, dataset, checkpoint, checkpoint_strategy)
        self._executor.check_free()
        return self._iterate(plan, self.create_run_dir())

    def _iterate(self, plan: RunPlan, run_dir: Path) -> TrainingIterator:
        self._executor.begin(plan, run_dir)
        return TrainingIterator(self._executor)

    def to_worker_group(self, train_cls: type[Any], *args: Any, **kwargs: Any) -> TrainWorkerGroup:
        """Starts the workers, each with an object of the user's class, and connects them.

        Args:
            train_cls: The class.
            args: Arguments for it.
            kwargs: Keyword arguments for it.

        Raises:
            RuntimeError: The trainer was started already.
        """
        if self._executor.is_started:
            raise RuntimeError("The trainer was started already: `to_worker_group` starts its own workers.")
        self._executor.start(train_cls=train_cls, train_cls_args=args, train_cls_kwargs=kwargs)
        return TrainWorkerGroup(self._executor)

    def to_tune_trainable(self, train_func: Callable[..., Any], dataset: Any = None) -> type[Any]:
        """A class for `ray.tune`: each trial makes a trainer like this one and runs the function with its own config.

        A trial tells Tune what rank 0 reports, and with each report, and at the end, gives it the newest checkpoint if
        that is a new one: of several that were saved between two reports Tune gets the last. `max_retries` and `logdir`
        are not taken over: a trial has the default retries and the folder of the trial.

        Args:
            train_func: The function.
            dataset: Divided over the workers of each trial.

        Raises:
            RuntimeError: The trainer was started already.
            MissingTuneError: Ray Tune is not installed; an `ImportError` and a `ValueError`.
        """
        from raysgd.train._tune import TrialPlan, make_trainable

        if self._executor.is_started:
            raise RuntimeError("The trainer was started already: every trial starts its own workers.")
        without_arguments(train_func, None)
        check_dataset(dataset)
        make_trainer = partial(
            Trainer, self._config, self._num_workers, self._use_gpu, dict(self._resources_per_worker), **self._pace
        )
        for_each = {"CPU": 1, "GPU": int(self._use_gpu), **self._resources_per_worker}
        bundle = {name: float(amount) for name, amount in for_each.items() if amount > 0}
        bundles = [{"CPU": 1.0}] + [bundle] * as_range(self._num_workers)[1]
        return make_trainable(TrialPlan(make_trainer, train_func, dataset, bundles))

    # ---------------------------------------------------------------------------------------------- folders

    def create_logdir(self, log_dir: str | Path | None) -> Path:
        """Makes the folder for the runs and returns it."""
        if log_dir is not None:
            check_path("logdir", log_dir)
        name = log_dir or time.strftime("train_%Y-%m-%d_%H-%M-%S")
        path = construct_path(name, constants.DEFAULT_RESULTS_DIR)
        path.mkdir(parents=True, exist_ok=True)
        logger.info("the results of this trainer go to %s", path)
        return path

    def create_run_dir(self) -> Path:
        """Makes the folder of the next run and returns it: the next number that no other trainer has taken."""
        while True:
            self._run_id += 1
            run_dir = self.latest_run_dir
            assert run_dir is not None
            with suppress(FileExistsError):
                run_dir.mkdir(parents=True)
                return run_dir

    @property
    def latest_run_dir(self) -> Path | None:
        """The folder of the latest run; None before the first one."""
        return self.logdir / f"run_{self._run_id:03d}" if self._run_id else None

    @property
    def latest_checkpoint_dir(self) -> Path | None:
        """Where the checkpoints of the latest run are, or would be; None before the first one."""
        run_dir = self.latest_run_dir
        return run_dir / constants.TRAIN_CHECKPOINT_SUBDIR if run_dir is not None else None

    # ---------------------------------------------------------------------------------------------- checkpoints

    @property
    def checkpoint_manager(self) -> CheckpointManager:
        """What takes the checkpoints."""
        return self._executor.checkpoint_manager

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of any run, also one that was not kept on disk; None when none was saved."""
        return self.checkpoint_manager.latest_checkpoint

    @property
    def latest_checkpoint_path(self) -> Path | None:
        """The newest file of the latest run; None when there is none."""
        return self.checkpoint_manager.latest_checkpoint_path

    @property
    def best_checkpoint_path(self) -> Path | None:
        """The best file of the latest run, by its `CheckpointStrategy`; None when there is none."""
        return self.checkpoint_manager.best_checkpoint_path

    @property
    def best_checkpoint(self) -> dict[str, Any] | None:
        """The content of that file."""
        return load_checkpoint(self.best_checkpoint_path)

    @staticmethod
    def load_checkpoint_from_path(checkpoint_file_path: str | Path) -> dict[str, Any]:
        """The content of a checkpoint file.

        Raises:
            ValueError: There is no such file.
        """
        found = load_checkpoint(checkpoint_file_path)
        if found is None:
            raise ValueError("`checkpoint_file_path=None`: need a path.")
        return found


class TrainingIterator:
    """Goes over what a running function reports. The function waits for it, one report ahead at most.

    Args:
        executor: Runs the function.
    """

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor
        self._run = executor.current_run
        self._is_finished = False
        self._final: list[Any] | None = None

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """Itself."""
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """The metrics of all workers at their next report, by rank."""
        if self._is_finished:
            raise StopIteration
        with self._finished_unless_fine():
            self._check_current()
            results = self._executor.fetch_next_result()
            if results is not None:
                return results
            self._final = self._executor.finish_training()
        self._is_finished = True
        raise StopIteration

    def is_finished(self) -> bool:
        """Whether the function has ended everywhere, or the run was given up."""
        return self._is_finished

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """What the function returned, by rank; None when the run was given up.

        Args:
            force: Whether to let a function that still runs come to its end, without its reports. Otherwise the result
                is None.
        """
        if not self._is_finished and not force:
            logger.info("the function still runs: iterate to its end first, or use `get_final_results(force=True)`")
            return None
        if not self._is_finished:
            with self._finished_unless_fine():
                self._check_current()
                self._final = self._executor.finish_training()
            self._is_finished = True
        return self._final

    def _check_current(self) -> None:
        if not self._executor.is_started or self._executor.current_run is not self._run:
            raise InactiveWorkerGroupError(
                "Since this iterator was made the trainer was shut down or began another run."
            )

    @contextmanager
    def _finished_unless_fine(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._is_finished = True
            raise


class TrainWorkerGroup:
    """Connected workers, each with an object of the user's class. `group[0].method.remote(...)` calls it.

    When a worker dies, `ray.get` of a call to it raises Ray's `RayActorError`, and calls to others may wait for it
    forever. `restart` then brings new workers; what the objects knew is lost, unless the class keeps it elsewhere.

    Args:
        executor: Started the workers.
    """

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor

    def __getitem__(self, index: int) -> WorkerHandle:
        return self._group.workers[index].actor

    def __len__(self) -> int:
        return len(self._group)

    @property
    def _group(self) -> WorkerGroup:
        return self._executor.get_worker_group()

    def restart(self) -> None:
        """Replaces all workers: new processes, connected again, with new objects made from the same arguments.

        Handles taken before are of no use any more: take them again, `group[0]`.

        Raises:
            InactiveWorkerGroupError: The group was shut down.
            WorkerError: The class or the initialization hook raised; of that class too.
            WorkersLostError: New workers died too, again and again.
        """
        self._executor.replace_workers()

    def shutdown(self, patience_s: float = 5) -> None:
        """Ends the workers; with `patience_s` above 0 they may close what they have first."""
        self._executor.shutdown(patience_s)


@contextmanager
def _told(callbacks: Sequence[TrainingCallback]) -> Iterator[None]:
    """Tells the callbacks of the end, all of them, whatever it is."""
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        _tell_end(callbacks, has_failed)


def _tell_end(callbacks: Sequence[TrainingCallback], has_failed: bool) -> None:
    errors: list[Exception] = []
    for callback in callbacks:
        try:
            callback.finish_training(error=has_failed)
        except Exception as error:
            errors.append(error)
    for hidden in errors[1:] if not has_failed else errors:
        logger.error("a callback failed in `finish_training`: %r", hidden)
    if errors and not has_failed:
        raise errors[0]


def amounts_for_each(
    use_gpu: bool, resources_per_worker: Mapping[str, float] | None
) -> tuple[float, float, dict[str, float]]:
    """CPUs, GPUs and other resources of a worker.

    Raises:
        ValueError: `use_gpu` and the GPUs contradict each other; or an amount is negative.
    """
    if resources_per_worker is not None and not isinstance(resources_per_worker, Mapping):
        raise TypeError(
            f'`resources_per_worker={resources_per_worker!r}`: need a dict, such as `{{"CPU": 2}}`, or None.'
        )
    if not resources_per_worker:
        return 1, int(use_gpu), {}
    for name, amount in resources_per_worker.items():
        if not isinstance(name, str):
            raise TypeError(f"`resources_per_worker={resources_per_worker!r}`: need texts as the names of resources.")
        check_amount(f"resources_per_worker[{name!r}]", amount)
    rest = dict(resources_per_worker)
    num_cpus, num_gpus = rest.pop("CPU", 1), rest.pop("GPU", int(use_gpu))
    if not use_gpu and num_gpus > 0:
        raise ValueError(
            f"`resources_per_worker` asks for {num_gpus} GPU and `use_gpu` is False: pass `use_gpu=True`, or leave "
            '"GPU" out.'
        )
    if use_gpu and num_gpus == 0:
        raise ValueError('`use_gpu=True`, but `resources_per_worker` asks for 0 "GPU": leave one of them out.')
    return num_cpus, num_gpus, rest


def _checked_callbacks(callbacks: Any) -> list[TrainingCallback]:
    if callbacks is not None and (isinstance(callbacks, str | bytes) or not isinstance(callbacks, Iterable)):
        raise TypeError(f"`callbacks={callbacks!r}`: need a list of callbacks, or None.")
    found = list(callbacks or ())
    for callback in found:
        if isinstance(callback, type) or not hasattr(callback, "start_training"):
            raise TypeError(f"`callbacks` has {callback!r}: need objects of subclasses of `TrainingCallback`.")
    return found


__getattr__, __dir__ = former_names(__name__)

__all__ = ["Trainer", "TrainWorkerGroup", "TrainingIterator", *MOVED[__name__]]
