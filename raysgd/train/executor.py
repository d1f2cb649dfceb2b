"""`BackendExecutor`, with which developers run functions on workers that stay alive, as in the old library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from raysgd.air.config import CheckpointConfig, ScalingConfig
from raysgd.core.arguments import check_amount, check_seconds
from raysgd.core.engine.shared.interface import GroupHistory
from raysgd.core.sending import packed_bytes
from raysgd.exceptions import TrainBackendError
from raysgd.storage import Folder
from raysgd.train._function_run import FunctionRun
from raysgd.train._worker.messages import TrainingResult, TrainingResultType
from raysgd.train._worker.shards import DividedData, check_dataset
from raysgd.train._workers import FunctionWorkers
from raysgd.train.backend import BackendConfig
from raysgd.train.checkpoint import CheckpointManager, CheckpointStrategy, checked_strategy, load_checkpoint
from raysgd.train.utils import without_arguments
from raysgd.train.worker_group import WorkerGroup
from raysgd.trainer.configuration import Placement
from raysgd.trainer.driver.leaving import Leaving


class RunsFunctions:
    """Base class of `Trainer` and `BackendExecutor`: workers that run functions, and the checkpoints of the functions.

    Args:
        config: Configures how the workers are connected.
        scaling: The number of workers, and their resources.
        max_retries: See `restarts_allowed`.
        heartbeat_s: A worker process that does not respond for this many seconds counts as lost.
        placement: On which nodes the workers run, and in which environment.
    """

    def __init__(
        self, config: BackendConfig, scaling: ScalingConfig, max_retries: int, heartbeat_s: float, placement: Placement
    ) -> None:
        restarts, self._checkpoints = restarts_allowed(max_retries), CheckpointManager()
        self._workers = FunctionWorkers(
            config, scaling, restarts, self._checkpoints, heartbeat_s=heartbeat_s, placement=placement
        )

    def _checked(
        self,
        train_func: Callable[..., Any],
        config: Any,
        dataset: Any,
        checkpoint: Mapping[str, Any] | str | Path | None,
        checkpoint_strategy: CheckpointStrategy | CheckpointConfig | None,
    ) -> Callable[..., FunctionRun]:
        """Check a user's arguments before the run creates anything, and return a function that starts the run.

        The function takes the folder of the run, the number of the last checkpoint, and the `Leaving`.

        Raises:
            InactiveWorkerGroupError: There are no workers.
            TrainBackendError: A function is already running.
            ValueError: The function takes more than one argument, or the file `checkpoint` does not exist.
            TypeError: An argument has the wrong type.
            UnpicklableError: The function or its config cannot be pickled. This is also a `TypeError`.
        """
        function = without_arguments(train_func, config)
        check_dataset(dataset)
        strategy = checked_strategy(checkpoint_strategy)
        begin_from = load_checkpoint(checkpoint)
        packed_bytes("`train_func`", train_func)
        packed_bytes("`config`", config)
        self._workers.check_free()

        def start(
            run_dir: Path | Folder | None, latest_id: int | None = None, leaving: Leaving | None = None
        ) -> FunctionRun:
            self._checkpoints.begin_run(run_dir, begin_from, strategy, latest_id)
            data = DividedData(dataset) if dataset is not None else None
            spec = self._workers.function_spec(function, self._checkpoints.score_attribute)
            run = FunctionRun(self._workers, spec, data, leaving=leaving)
            run.start()
            return run

        return start

    @property
    def is_started(self) -> CallableFlag:
        """True if the workers have started.

        It can be read like a property or called like a method, because versions of the old library differ in this.
        """
        return CallableFlag(self._workers.is_started)

    @property
    def history(self) -> GroupHistory:
        """The events of the workers since `start`, such as failures and changes in the number of workers.

        Raises:
            InactiveWorkerGroupError: There are no workers.
        """
        return self._workers.controller.history

    @property
    def checkpoint_manager(self) -> CheckpointManager:
        """The `CheckpointManager` that receives and stores the checkpoints of the functions."""
        return self._checkpoints

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of any run, even if it was not written to disk; None if no checkpoint was saved."""
        return self._checkpoints.latest_checkpoint

    @property
    def latest_checkpoint_dir(self) -> Path | Folder | None:
        """The folder for the checkpoint files of the latest run; None if there was no run, or if it has no folder."""
        return self._checkpoints.latest_checkpoint_dir

    @property
    def latest_checkpoint_path(self) -> Path | str | None:
        """The path or URI of the newest checkpoint file of the latest run; None if the run has no file."""
        return self._checkpoints.latest_checkpoint_path


class BackendExecutor(RunsFunctions):
    """Keeps workers alive and runs functions on them, one at a time.

    Args:
        backend_config: Configures how the workers are connected.
        num_workers: Number of workers, or a pair of the minimum and maximum.
        num_cpus_per_worker: CPUs per worker.
        num_gpus_per_worker: GPUs per worker.
        additional_resources_per_worker: Other resources per worker.
        max_retries: The number of the worker failure, counted from 1, that is raised as an error: 3 allows two restarts
            and raises the third failure. -1 allows any number of failures. Each `start`, training function and `run`
            counts from 1 again. Workers that die while starting also count.
        resize_interval_s: Seconds between two searches for free resources, if a run has fewer workers than the maximum.
        heartbeat_s: A worker process that does not respond for this many seconds counts as lost.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        backend_config: BackendConfig,
        num_workers: int | tuple[int, int] = 1,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        additional_resources_per_worker: Mapping[str, float] | None = None,
        max_retries: int = 3,
        *,
        resize_interval_s: float = 60.0,
        heartbeat_s: float = 60.0,
    ) -> None:
        check_seconds("resize_interval_s", resize_interval_s)
        check_amount("num_cpus_per_worker", num_cpus_per_worker)
        check_amount("num_gpus_per_worker", num_gpus_per_worker)
        placement = Placement(additional_resources_per_worker)
        scaling = ScalingConfig(
            num_workers=num_workers,
            use_gpu=num_gpus_per_worker > 0,
            resources_per_worker={"CPU": num_cpus_per_worker, "GPU": num_gpus_per_worker},
            elastic_resize_monitor_interval_s=resize_interval_s,
        )
        super().__init__(backend_config, scaling, max_retries, heartbeat_s, placement)

    def start(
        self,
        initialization_hook: Callable[[], Any] | None = None,
        train_cls: Callable[..., Any] | None = None,
        train_cls_args: Sequence[Any] | None = None,
        train_cls_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers and connect them.

        Args:
            initialization_hook: Called in each worker process before anything else.
            train_cls: Class of an object that every worker creates, including workers that replace lost workers. Access
                the objects through `worker_group.workers`.
            train_cls_args: Positional arguments for the class.
            train_cls_kwargs: Keyword arguments for the class.

        Raises:
            RuntimeError: The workers have already started.
            ReservationTimeoutError: The cluster did not grant the resources. This is also a `TimeoutError`.
            WorkerError: The hook or the class raised. The error is also an instance of the class that was raised.
            WorkersLostError: Too many workers died while starting.
        """
        make: Callable[..., Any] | None = train_cls
        make_object = partial(make, *(train_cls_args or ()), **(train_cls_kwargs or {})) if make is not None else None
        self._workers.start(self, initialization_hook, make_object)

    def shutdown(self, patience_s: float = 5) -> None:
        """Stop the workers. With `patience_s` above 0, they shut down cleanly; otherwise, they are killed."""
        self._workers.stop(patience_s)

    def start_training(
        self,
        train_func: Callable[..., Any],
        run_dir: Path | Folder | None = None,
        dataset: Any = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | CheckpointConfig | None = None,
        latest_checkpoint_id: int | None = None,
        *,
        config: Any = None,
    ) -> None:
        """Start a function on all workers.

        Args:
            train_func: The function. It takes either no argument or the config.
            run_dir: Folder of the run, to which checkpoints are written. None to write no files.
            dataset: Data to shard across the workers: an object with `split(n, equal=True)`, or a dict of such objects.
            checkpoint: The checkpoint that `load_checkpoint` returns at first: a dict, or the path or URI of a saved
                checkpoint.
            checkpoint_strategy: Decides which checkpoints to keep; None to keep all.
            latest_checkpoint_id: Number of the last checkpoint before this run. The run continues the numbering.
            config: Argument of the function, passed unchanged; None for an empty dict.

        Raises:
            InactiveWorkerGroupError: There are no workers.
            TrainBackendError: A function is already running.
            ValueError: The file `checkpoint` does not exist.
            TypeError: An argument has the wrong type.
        """
        self._checked(train_func, config, dataset, checkpoint, checkpoint_strategy)(run_dir, latest_checkpoint_id)

    def fetch_next_result(self) -> list[dict[str, Any]] | None:
        """Return the metrics of all workers at their next report, or None if all functions have finished."""
        return self._running().next_reports()

    def get_next_results(self) -> list[TrainingResult] | None:
        """Return the next message of all workers: a report, or a checkpoint without a report.

        For a checkpoint, only the rank that sent it has content in `data`. Return None if all functions have finished.
        """
        run = self._running()
        step = run.next_step()
        if step.kind is None:
            return None
        if step.kind is TrainingResultType.REPORT:
            return [TrainingResult(step.kind, run.decoded(data)) for data in step.data]
        saved: list[dict[str, Any]] = [{} for _ in step.data]
        if step.checkpoint_ref is not None:
            saved[step.source] = self._checkpoints.latest_checkpoint or {}
        return [TrainingResult(step.kind, content) for content in saved]

    def pause_reporting(self) -> None:
        """Discard further reports, so that the functions do not wait for them to be fetched."""
        self._running().mute()

    def finish_training(self) -> list[Any]:
        """Let the functions run to their end, discard their further reports, and return their results by rank."""
        results = self._running().finish()
        self._workers.current_run = None
        return results

    def abort_training(self) -> None:
        """Stop the function that is running on the workers. If no function is running, do nothing."""
        self._workers.abort()

    def _running(self) -> FunctionRun:
        run = cast(FunctionRun | None, self._workers.current_run)
        if self._workers.controller and (run is None or (run.is_over and run.returned is None)):
            raise TrainBackendError("No function is running: call `start_training` first.")
        assert run is not None
        return run

    @property
    def worker_group(self) -> WorkerGroup:
        """The current workers. If they were killed, new workers are started first."""
        return self.get_worker_group()

    def get_worker_group(self) -> WorkerGroup:
        """Return the current workers. If they were killed, start new workers first.

        Raises:
            InactiveWorkerGroupError: `start` was not called, or the executor was shut down.
        """
        return self._workers.ensure_workers()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` once in every worker, and return the results by rank.

        Raises:
            WorkerError: The function raised. The error is also an instance of the class that was raised.
            TrainingWorkerError: A worker died, and new workers have started. This is also a `RuntimeError`.
            WorkersLostError: A worker died, and either no retry is left or the new workers died too.
        """
        if self._workers.current_run is None or self._workers.current_run.is_over:
            self._workers.budget.renew()
        return self.get_with_failure_handling(self.get_worker_group().execute_async(function, *args, **kwargs))

    def get_with_failure_handling(self, references: Sequence[Any]) -> list[Any]:
        """Wait for calls that were started with `worker_group`, and return their results.

        If a worker died during a call, replace all workers, unless no retry is left.

        Args:
            references: The Ray object references of the calls' results.

        Raises:
            WorkerError: A function raised. The error is also an instance of the class that was raised.
            TrainingWorkerError: A worker died, and new workers have started.
            WorkersLostError: Workers died too often.
        """
        return self._workers.gather(references)

    def _get_num_failures(self) -> int:
        return self._workers.budget.num_spent + self._workers.budget.num_refused

    def get_latest_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint of any run, or None if no checkpoint was saved."""
        return self.latest_checkpoint

    @property
    def latest_checkpoint_id(self) -> int:
        """Number of the newest checkpoint, counted from 1.

        Before a run's first checkpoint, this is the number from which the run continues counting, or 0.
        """
        return self._checkpoints.latest_checkpoint_id


def restarts_allowed(max_retries: int) -> float:
    """Return how many times a run restarts before a failure is raised as an error.

    With `max_retries=3`, the third failure is raised, so there are two restarts. A negative value allows any number.

    >>> [restarts_allowed(number) for number in (0, 1, 3, -1)]
    [0, 0, 2, inf]
    """
    return float("inf") if max_retries < 0 else max(0, max_retries - 1)


class CallableFlag(int):
    """A boolean value that can also be called.

    This is the type of `is_started`, which was a property in some versions of the old library, and a method in others.
    """

    def __call__(self) -> bool:
        """Return the flag as a `bool`."""
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))
