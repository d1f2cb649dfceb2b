"""`BackendExecutor`, which runs functions on workers that stay alive. `Trainer` and `fit` use it; users may, too.

The executor outlives its runs. Each run is a `FunctionRun`. After a failure, only the engine's controller retries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from raysgd.air.config import CheckpointConfig, ScalingConfig
from raysgd.air.reports import PreemptionInfo
from raysgd.core.arguments import MIN_HEARTBEAT_S, check_amount, check_num_workers, check_seconds
from raysgd.core.cluster.program_end import end_with
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.lifecycle import ElasticRules
from raysgd.core.engine.placement import drain_deadlines, draining_nodes, ensure_ray
from raysgd.core.engine.policies import Diagnosis, FailurePolicy, RetryBudget, ScalingPolicy
from raysgd.core.engine.shared.connection import NoConnection
from raysgd.core.engine.shared.group_events import GroupHistory
from raysgd.core.engine.shared.group_spec import FrontEndWords, GroupSpec
from raysgd.core.engine.worker import packed_bytes
from raysgd.core.text.log_lines import LogRelay
from raysgd.exceptions import (
    InactiveWorkerGroupError,
    OnFailure,
    TrainBackendError,
    TrainingWorkerError,
    WorkersLostError,
)
from raysgd.storage import Folder
from raysgd.train import constants
from raysgd.train._function_run import FunctionRun
from raysgd.train._plugin_hooks import PluginHooks
from raysgd.train._worker.function_replica import FunctionReplicas
from raysgd.train._worker.messages import FunctionSpec, TrainingResult, TrainingResultType
from raysgd.train._worker.shards import DividedData, check_dataset
from raysgd.train.backend import BackendConfig, PlacedConnection, backend_of
from raysgd.train.checkpoint import (
    CheckpointManager,
    CheckpointStrategy,
    CheckpointTaker,
    checked_strategy,
    load_checkpoint,
)
from raysgd.train.utils import without_arguments
from raysgd.train.worker_group import LostDuringCallError, WorkerGroup, gather
from raysgd.trainer.configuration.placement import Placement
from raysgd.trainer.driver.leaving import Leaving

logger = logging.getLogger(__name__)


WORDS = FrontEndWords(
    when_shut_down="Call `start` again for new workers.",
    name="the function `Trainer`",
    when_interrupted="Checkpoints that the functions saved are kept.",
    when_starved="Ask for fewer workers or less per worker, or free what is held. Saved checkpoints are kept.",
    when_spent=(
        "`max_retries` allows no more failures: a larger number does, and -1 any number. Saved checkpoints are kept: "
        "to continue, pass `latest_checkpoint` to the next run as `checkpoint`."
    ),
    when_not_granted=(
        "Ask for fewer workers or less per worker, free what is held, add nodes, or wait longer by setting the "
        "environment variable TRAIN_PLACEMENT_GROUP_TIMEOUT_S."
    ),
    with_cpus='resources_per_worker={{"CPU": {:g}}}',
    after_end="saved checkpoints are kept",
    restart_point="from the newest checkpoint, or from the beginning without one",
)
"""Advice for users of training functions, which the engine adds to its messages."""


@dataclass(frozen=True)
class ExecutorRules:
    """Settings that `Trainer` and `fit` choose for their executors. The defaults are those of `Trainer`.

    Attributes:
        failures: Policy that decides after a failure whether to retry or to raise the error.
        checkpoints: Object that receives the checkpoints; None for the executor's `CheckpointManager`.
        on_failure: Function to call before the training function restarts after a failure.
        words: Advice for users, which the engine adds to its messages.
        num_ahead: Number of reports that may wait for the driver before a function is blocked.
        is_elastic: True if functions continue without a restart when other workers are lost.
        num_spares: Number of spare workers that are ready to replace lost workers.
    """

    failures: FailurePolicy = field(default_factory=FailurePolicy)
    checkpoints: CheckpointTaker | None = None
    on_failure: Callable[[Diagnosis], None] = lambda diagnosis: None
    words: FrontEndWords = WORDS
    num_ahead: int = 0
    is_elastic: bool = False
    num_spares: int = 0


@dataclass(frozen=True)
class RunPlan:
    """The validated arguments of a run. They are validated by `checked`, before the run creates anything.

    Attributes:
        function: The user's function, with its config bound.
        dataset: The data to shard across the workers; None for a run without data.
        checkpoint: Content of the checkpoint that the run starts from; None to start from the beginning.
        checkpoint_strategy: Decides which checkpoints to keep; None to keep all.
    """

    function: Callable[[], Any]
    dataset: Any = None
    checkpoint: dict[str, Any] | None = None
    checkpoint_strategy: CheckpointStrategy | None = None

    @classmethod
    def checked(
        cls,
        train_func: Callable[..., Any],
        config: Any = None,
        dataset: Any = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | CheckpointConfig | None = None,
    ) -> RunPlan:
        """Create a plan from a user's arguments.

        Raises:
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
        return cls(function, dataset, begin_from, strategy)


class BackendExecutor:
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
        placement: Further requirements of the workers, and how Ray places the workers on nodes.
        rules: Settings that differ between `Trainer` and `fit`. Default: those of `Trainer`.

    Raises:
        ValueError: A number is out of range, or `rules.is_elastic` is not possible with the other arguments.
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
        placement: Placement | None = None,
        rules: ExecutorRules | None = None,
    ) -> None:
        workers = ScalingConfig(num_workers=num_workers)
        least, most = workers.worker_range
        check_seconds("resize_interval_s", resize_interval_s)
        check_seconds("heartbeat_s", heartbeat_s, MIN_HEARTBEAT_S)
        check_amount("num_cpus_per_worker", num_cpus_per_worker)
        check_amount("num_gpus_per_worker", num_gpus_per_worker)
        rules, placement, read = rules or ExecutorRules(), placement or Placement(), constants.env_integer
        check_spares(rules.num_spares, rules.is_elastic)
        if rules.is_elastic:
            check_elastic(backend_config, (least, most), num_gpus_per_worker, max_retries)
        self._config, self._rules = backend_config, rules
        self._backend = backend_of(backend_config)
        self._scaling = ScalingPolicy(max_workers=most, min_workers=least)
        self._is_range = isinstance(workers.num_workers, tuple)
        needs = placement.resources(num_cpus_per_worker, num_gpus_per_worker)
        self._spec = GroupSpec(
            NoConnection(),
            FunctionReplicas(),
            replace(needs, custom={**(additional_resources_per_worker or {}), **needs.custom}),
            reservation_timeout_s=read(constants.TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV, 100),
            captures=False,
            runs_on=rules.is_elastic,
            num_spares=rules.num_spares,
            packs=placement.packs(by_default=not read(constants.TRAIN_ENABLE_WORKER_SPREAD_ENV, 0)),
            heartbeat_s=heartbeat_s,
            words=rules.words,
        )
        shares = int(self._backend.share_cuda_visible_devices)
        self._shares_gpus = bool(read(constants.ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, shares))
        self._is_detailed = bool(read(constants.ENABLE_DETAILED_AUTOFILLED_METRICS_ENV, 0))
        self._budget = RetryBudget(restarts_allowed(max_retries))
        self._resize_interval_s = resize_interval_s
        self._controller: ElasticController | None = None
        self._hooks: PluginHooks
        self.checkpoint_manager = CheckpointManager()
        self._checkpoints = rules.checkpoints or self.checkpoint_manager
        self._run: FunctionRun | None = None

    @property
    def is_started(self) -> CallableFlag:
        """True if the workers have started.

        It can be read like a property or called like a method, because versions of the old library differ in this.
        """
        return CallableFlag(self._controller is not None)

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
        if self._controller is not None:
            raise RuntimeError("The workers have already started: call `shutdown` before another `start`.")
        make: Callable[..., Any] | None = train_cls
        make_object = partial(make, *(train_cls_args or ()), **(train_cls_kwargs or {})) if make is not None else None
        self._hooks = PluginHooks(
            self._backend,
            self._config,
            self._spec.resources,
            self._checkpoints.await_arrival,
            make_object,
            self._rules.on_failure,
        )
        controller = self._make_controller(self._group_spec(initialization_hook))
        ensure_ray()
        self._budget.renew()
        self._finalizer = end_with(self, controller.stop, force=True)
        with OnFailure(self._finalizer):
            controller.start(as_fits=self._is_range)
        self._controller = controller

    def _group_spec(self, initialization_hook: Callable[[], Any] | None) -> GroupSpec:
        """Return the settings with which the engine starts every group of workers for this executor."""
        num_gpus = self._spec.resources.num_gpus
        connection = self._config.connection(num_gpus)
        if isinstance(connection, PlacedConnection):
            connection.shares_gpus = self._shares_gpus
        elif self._shares_gpus and num_gpus > 0:
            connection = PlacedConnection(connection, shares_gpus=True)
        return replace(self._spec, connection=connection, initialization_hook=initialization_hook, relay=LogRelay())

    def _make_controller(self, spec: GroupSpec) -> ElasticController:
        leaving_nodes = WeakMethod(self._leaving_nodes)  # with a strong reference, the executor would never be freed

        def leaving() -> frozenset[str]:
            find_leaving = leaving_nodes()
            return frozenset() if find_leaving is None else find_leaving()

        return ElasticController(
            replace(spec, make_replica=self._hooks.replicas),
            self._scaling,
            replace(self._rules.failures, continues=self._rules.is_elastic),
            rules=ElasticRules(not self._rules.is_elastic, self._resize_interval_s, leaving),
            start_budget=self._budget,
            hooks=self._hooks,
        )

    def _leaving_nodes(self) -> frozenset[str]:
        """Return the nodes that the workers must leave now, because Ray will take them away soon.

        Return no nodes while a restart on other nodes would lose progress.
        """
        if self._run is not None and not self._run.is_over and not self._run.may_restart:
            return frozenset()
        nodes = draining_nodes()
        if nodes:
            self._checkpoints.flush()
        return nodes

    def shutdown(self, patience_s: float = 5) -> None:
        """Stop the workers and free their resources. Other actors and reservations are not affected.

        Args:
            patience_s: If above 0, workers shut down cleanly; otherwise, they are killed. In both cases, first wait a
                limited time for a checkpoint that a worker is sending.
        """
        controller, self._controller = self._controller, None
        run, self._run = self._run, None
        if run is not None:
            run.is_over = True  # ends iterators over the run's reports
        if controller is not None:
            self._finalizer.detach()
            controller.stop(force=patience_s <= 0)

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
        plan = RunPlan.checked(train_func, config, dataset, checkpoint, checkpoint_strategy)
        self.start_plan(plan, run_dir, latest_checkpoint_id)

    def start_plan(
        self,
        plan: RunPlan,
        run_dir: Path | Folder | None = None,
        latest_checkpoint_id: int | None = None,
        leaving: Leaving | None = None,
    ) -> FunctionRun:
        """Start the function of a `RunPlan` on all workers; see `start_training`.

        Raises:
            InactiveWorkerGroupError: There are no workers.
            TrainBackendError: A function is already running.
        """
        self.check_free()
        self.checkpoint_manager.begin_run(run_dir, plan.checkpoint, plan.checkpoint_strategy, latest_checkpoint_id)
        data = DividedData(plan.dataset) if plan.dataset is not None else None
        return self.launch(plan.function, data, leaving=leaving)

    def launch(
        self,
        function: Callable[[], Any],
        data: DividedData | None = None,
        make_session: Callable[..., Any] | None = None,
        on_wait: Callable[[], None] | None = None,
        leaving: Leaving | None = None,
    ) -> FunctionRun:
        """Start a function on all workers. The executor's `CheckpointTaker` receives the function's checkpoints.

        Args:
            function: The function, with its config bound.
            data: Object that shards the function's data whenever workers start; None for no data.
            make_session: See `FunctionSpec`.
            on_wait: Function to call about ten times a second while the driver waits for the workers.
            leaving: Reports whether a signal has asked the program to end; see `listening`.
        """
        self.check_free()
        spec = FunctionSpec(
            function,
            self._backend.encode_data,
            self.checkpoint_manager.score_attribute,
            self._is_detailed,
            explain=getattr(self._backend, "explain", None),  # a plug-in need not be a subclass of `Backend`
            make_session=make_session,
            num_ahead=self._rules.num_ahead,
            is_elastic=self._rules.is_elastic,
        )
        self._run = run = FunctionRun(
            self._active(),
            self._hooks,
            spec,
            self._checkpoints,
            self._budget,
            self._backend.decode_data,
            data,
            self._scaling.max_workers,
            self._resize_interval_s,
            on_wait,
            self._preemption,
            leaving,
        )
        self._budget.renew()
        run.start()
        return run

    @contextmanager
    def listening(self, leaving: Leaving) -> Iterator[None]:
        """Inside the block, handle signals that ask the program to end.

        After such a signal, lost workers are not replaced. Enter the block after the workers have started, because Ray
        sets its own signal handlers when it starts.
        """

        def expect_end(is_ending: bool = True) -> None:
            if self._controller is not None:
                self._controller.is_ending = is_ending

        try:
            with leaving.listening(expect_end):
                yield
        finally:
            expect_end(False)

    def _preemption(self, ends_at_ms: int | None) -> PreemptionInfo | None:
        """Return the workers' nodes that Ray will take away, or all of the workers' nodes if the program ends.

        Args:
            ends_at_ms: Time at which the program ends, in milliseconds of Unix time; None if it does not end.
        """
        nodes = [worker.metadata.node_id for worker in self._hooks.workers.workers]
        return preemption_of(nodes, drain_deadlines() if ends_at_ms is None else dict.fromkeys(nodes, ends_at_ms))

    def check_free(self) -> None:
        """Check that the workers have started and that no function is running on them.

        Raises:
            InactiveWorkerGroupError: There are no workers.
            TrainBackendError: A function is running.
        """
        self._active()
        if self._run is not None and not self._run.is_over:
            raise TrainBackendError(
                "A run is already active: iterate over its results to the end, for instance with "
                "`get_final_results(force=True)` of its iterator, or call `shutdown` and `start` again."
            )

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
            saved[step.source] = self.checkpoint_manager.latest_checkpoint or {}
        return [TrainingResult(step.kind, content) for content in saved]

    def pause_reporting(self) -> None:
        """Discard further reports, so that the functions do not wait for them to be fetched."""
        self._running().mute()

    def finish_training(self) -> list[Any]:
        """Let the functions run to their end, discard their further reports, and return their results by rank."""
        run, self._run = self._running(), None
        return run.finish()

    def abort_training(self) -> None:
        """Stop the function that is running on the workers. If no function is running, do nothing."""
        run, self._run = self._run, None
        if run is not None and self._controller is not None:
            run.abort()

    def _running(self) -> FunctionRun:
        self._active()
        if self._run is None or (self._run.is_over and self._run.returned is None):
            raise TrainBackendError("No function is running: call `start_training` first.")
        return self._run

    @property
    def worker_group(self) -> WorkerGroup:
        """The current workers. If they were killed, new workers are started first."""
        return self.get_worker_group()

    def get_worker_group(self) -> WorkerGroup:
        """Return the current workers. If they were killed, start new workers first.

        Raises:
            InactiveWorkerGroupError: `start` was not called, or the executor was shut down.
        """
        self._active().ensure_group()
        return self._hooks.workers

    def replace_workers(self) -> WorkerGroup:
        """Kill all workers, start new workers, and return the new workers.

        Raises:
            InactiveWorkerGroupError: There are no workers.
            TrainBackendError: A function is running.
        """
        controller = self._active()
        self.check_free()
        controller.kill_group()
        self._budget.renew()
        return self.get_worker_group()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` once in every worker, and return the results by rank.

        Raises:
            WorkerError: The function raised. The error is also an instance of the class that was raised.
            TrainingWorkerError: A worker died, and new workers have started. This is also a `RuntimeError`.
            WorkersLostError: A worker died, and either no retry is left or the new workers died too.
        """
        if self._run is None or self._run.is_over:
            self._budget.renew()
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
        controller = self._active()
        try:
            return gather(references)
        except LostDuringCallError as lost:
            controller.kill_group()
            if self._budget.is_spent:
                self._budget.refuse()
                raise WorkersLostError(f"{lost}. {self._spec.words.when_spent}") from lost
            self._budget.pay_for_restart()
            self.get_worker_group()
            raise TrainingWorkerError(f"{lost}; new workers have started") from lost

    def _active(self) -> ElasticController:
        if self._controller is None:
            raise InactiveWorkerGroupError("There are no workers: call `start` first.")
        return self._controller

    def _get_num_failures(self) -> int:
        return self._budget.num_spent + self._budget.num_refused

    @property
    def history(self) -> GroupHistory:
        """The history of the workers since `start`, with events such as failures and resizes."""
        return self._active().history

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of any run; None if no checkpoint was saved."""
        return self.checkpoint_manager.latest_checkpoint

    def get_latest_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint of any run, or None if no checkpoint was saved."""
        return self.latest_checkpoint

    @property
    def latest_checkpoint_id(self) -> int:
        """Number of the newest checkpoint, counted from 1.

        Before a run's first checkpoint, this is the number from which the run continues counting, or 0.
        """
        return self.checkpoint_manager.latest_checkpoint_id

    @property
    def latest_checkpoint_dir(self) -> Path | Folder | None:
        """The folder for the checkpoint files of the latest run; None if the run has no folder."""
        return self.checkpoint_manager.latest_checkpoint_dir

    @property
    def latest_checkpoint_path(self) -> Path | str | None:
        """The path or URI of the newest checkpoint file of the latest run; None if the run has no file."""
        return self.checkpoint_manager.latest_checkpoint_path


def check_spares(num_spares: Any, is_elastic: bool) -> None:
    """Check the number of spare workers.

    Raises:
        ValueError: The number is out of range, or spare workers were requested without `elastic=True`.
    """
    check_num_workers("spare_workers", num_spares, hint="They wait to step in for lost ones.", least=0)
    if num_spares and not is_elastic:
        raise ValueError(
            f"`spare_workers={num_spares}` without `elastic=True`: they step in where functions go on after a failure. "
            "Pass both, or neither."
        )


def check_elastic(config: BackendConfig, num_workers: tuple[int, int], num_gpus: float, max_retries: int) -> None:
    """Check that a trainer's other arguments allow `elastic=True`.

    Args:
        config: Configures how the workers are connected.
        num_workers: Minimum and maximum number of workers.
        num_gpus: GPUs per worker.
        max_retries: The number of the failure, counted from 1, that is raised as an error. A negative value allows any
            number of failures.

    Raises:
        ValueError: With these arguments, functions cannot continue without a restart after a failure.
    """
    least, most = num_workers
    if least == most:
        raise ValueError(
            f"`elastic=True` and `num_workers={most}`: after a failure, fewer workers continue, so pass the "
            f"least and the most, such as `num_workers=({max(1, most - 1)}, {most})`."
        )
    if not config.can_regroup(num_gpus):
        raise ValueError(
            f"`elastic=True` with `{config!r}`: only workers that `TorchConfig` connects with gloo can form a new "
            'group while a function runs. Pass `TorchConfig(backend="gloo")`, or leave `elastic` out.'
        )
    if not restarts_allowed(max_retries):
        raise ValueError(
            "`elastic=True` where the first failure ends the run: allow more, with `max_retries` of at least 2 in "
            "`Trainer`, with `FailureConfig(max_failures=...)` of at least 1 in `fit`, or -1 for any number."
        )


def preemption_of(nodes: Sequence[str], deadlines: Mapping[str, int]) -> PreemptionInfo | None:
    """Return the workers' nodes that are about to be taken away, or None if all nodes stay.

    >>> preemption_of(["a", "b", "a"], {"a": 7000, "c": 1}).preempted_node_to_ranks
    {'a': [0, 2]}

    Args:
        nodes: The node of each rank.
        deadlines: For each node that will be taken away, when this happens, in milliseconds of Unix time; 0 if unknown.
    """
    ranks = {node: [rank for rank, place in enumerate(nodes) if place == node] for node in nodes if node in deadlines}
    times = [deadlines[node] for node in ranks if deadlines[node]]
    return PreemptionInfo(min(times, default=None), ranks) if ranks else None


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
