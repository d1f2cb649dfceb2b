"""`FunctionWorkers`: the workers of a trainer of functions. They stay alive, and run one function at a time.

`Trainer`, `fit` and `BackendExecutor` use this class. It connects each group of workers with a plug-in (`Backend`), and
creates the user's object in each worker. After a failure, only the engine's controller retries.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raysgd.air.config import ScalingConfig
from raysgd.air.reports import PreemptionInfo
from raysgd.core.arguments import MIN_HEARTBEAT_S, check_num_workers, check_seconds
from raysgd.core.cluster.ray_cluster import drain_deadlines, draining_nodes, end_with, ensure_ray
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.group import GroupHooks
from raysgd.core.engine.group import WorkerGroup as EngineGroup
from raysgd.core.engine.policies import Diagnosis, ElasticRules, FailurePolicy, RetryBudget, ScalingPolicy
from raysgd.core.engine.shared.interface import FrontEndWords, GroupSpec, NoConnection
from raysgd.core.engine.shared.types import GroupReport, WorkerInfo
from raysgd.core.text.log_lines import LogRelay
from raysgd.exceptions import (
    InactiveWorkerGroupError,
    OnFailure,
    TrainBackendError,
    TrainingWorkerError,
    WorkersLostError,
    failure_logged,
)
from raysgd.train import constants
from raysgd.train._worker.function_replica import FunctionReplicas
from raysgd.train._worker.messages import FunctionSpec
from raysgd.train.backend import BackendConfig, PlacedConnection, backend_of
from raysgd.train.checkpoint import CheckpointTaker
from raysgd.train.worker_group import LostDuringCallError, WorkerGroup, gather, make_objects
from raysgd.trainer.configuration import Placement

logger = logging.getLogger(__name__)

_ARRIVAL_S = 30.0  # how long to wait for a checkpoint that a worker is sending before the worker is stopped
_ARRIVAL_AT_CTRL_C_S = 3.0  # how long to wait for the checkpoint after Ctrl-C; a second Ctrl-C ends the wait

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


class RunningFunction(Protocol):
    """The run of a function, as the workers that run it see it."""

    is_over: bool
    may_restart: bool

    def abort(self) -> None:
        """Stop the function so that another function can start."""


class FunctionWorkers(GroupHooks):
    """Keeps workers alive and runs functions on them, one at a time.

    Args:
        config: Configures how the workers are connected.
        scaling: Number and resources of the workers. Here, strict placement strategies do not count.
        num_restarts: Number of restarts before a failure is raised as an error. Each `start`, training function and
            call of `gather` counts from 0 again. Workers that die while starting also count.
        checkpoints: Object that receives the functions' checkpoints.
        heartbeat_s: A worker process that does not respond for this many seconds counts as lost.
        placement: Further requirements of the workers, and how Ray places the workers on nodes.
        failures: Policy that decides after a failure whether to retry or to raise the error.
        on_failure: Function to call before the training function restarts after a failure.
        words: Advice for users, which the engine adds to its messages.
        num_ahead: Number of reports that may wait for the driver before a function is blocked.

    Attributes:
        group: The engine's group of the current workers. If no workers are running, the group of the last workers. Not
            set before the first start, like `workers`.
        workers: The current workers, as the `WorkerGroup` that plug-ins and users get.
        num_started: Number of groups that were started.
        num_changes: Number of times that the workers of a running group changed.
        joined: For each current worker, the value of `num_changes` when it joined the group.
        replicas: Creates the `FunctionReplica` in each worker, which runs the function.
        current_run: The run of the latest function; None if no function is running.

    Raises:
        ValueError: A number is out of range, or functions cannot continue in place with these arguments.
    """

    def __init__(
        self,
        config: BackendConfig,
        scaling: ScalingConfig,
        num_restarts: float,
        checkpoints: CheckpointTaker,
        *,
        heartbeat_s: float = 60.0,
        placement: Placement,
        failures: FailurePolicy | None = None,
        on_failure: Callable[[Diagnosis], None] = lambda diagnosis: None,
        words: FrontEndWords = WORDS,
        num_ahead: int = 0,
    ) -> None:
        least, most = scaling.worker_range
        check_seconds("heartbeat_s", heartbeat_s, MIN_HEARTBEAT_S)
        check_elastic(config, scaling, num_restarts)
        read = constants.env_integer
        self._config, self._backend = config, backend_of(config)
        self._scaling = ScalingPolicy(max_workers=most, min_workers=least)
        self._failures = replace(failures or FailurePolicy(), continues=scaling.elastic)
        self._on_failure, self._num_ahead = on_failure, num_ahead
        shares = int(self._backend.share_cuda_visible_devices)
        self._shares_gpus = bool(read(constants.ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, shares))
        self._is_detailed = bool(read(constants.ENABLE_DETAILED_AUTOFILLED_METRICS_ENV, 0))
        self.replicas = FunctionReplicas()
        self.spec = GroupSpec(
            NoConnection(),
            self.replicas,
            placement.resources(scaling.num_cpus_per_worker, scaling.num_gpus_per_worker),
            reservation_timeout_s=read(constants.TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV, 100),
            captures=False,
            runs_on=scaling.elastic,
            num_spares=scaling.spare_workers,
            packs=placement.packs(by_default=not read(constants.TRAIN_ENABLE_WORKER_SPREAD_ENV, 0)),
            heartbeat_s=heartbeat_s,
            words=words,
        )
        self.checkpoints, self.budget = checkpoints, RetryBudget(num_restarts)
        self.max_workers, self.resize_interval_s = most, scaling.elastic_resize_monitor_interval_s
        self.decode: Callable[[Any], dict[str, Any]] = self._backend.decode_data
        self._controller: ElasticController | None = None
        self.group: EngineGroup
        self.workers: WorkerGroup
        self._make_object: Callable[[], Any] | None = None
        self._may_wait = True
        self.num_started = self.num_changes = 0
        self.joined: dict[WorkerInfo, int] = {}
        self.current_run: RunningFunction | None = None

    # ------------------------------------------------------------------------------------------------- start and stop

    @property
    def is_started(self) -> bool:
        """True if the workers have started."""
        return self._controller is not None

    @property
    def controller(self) -> ElasticController:
        """The engine's controller, which starts, replaces and ends the workers.

        Raises:
            InactiveWorkerGroupError: There are no workers.
        """
        if self._controller is None:
            raise InactiveWorkerGroupError("There are no workers: call `start` first.")
        return self._controller

    def start(
        self,
        owner: Any,
        initialization_hook: Callable[[], Any] | None = None,
        make_object: Callable[[], Any] | None = None,
    ) -> None:
        """Start the workers and connect them.

        Args:
            owner: Object of the user. When it is freed, the workers end. This object must not refer to it.
            initialization_hook: Called in each worker process before anything else.
            make_object: Function that creates the user's object in every worker; None for no object.

        Raises:
            RuntimeError: The workers have already started.
            ReservationTimeoutError: The cluster did not grant the resources. This is also a `TimeoutError`.
            WorkerError: A function raised. The error is also an instance of the class that was raised.
            WorkersLostError: Too many workers died while starting.
        """
        if self._controller is not None:
            raise RuntimeError("The workers have already started: call `shutdown` before another `start`.")
        self._make_object = make_object
        controller = ElasticController(
            self.group_spec(initialization_hook),
            self._scaling,
            self._failures,
            rules=ElasticRules(not self.spec.runs_on, self.resize_interval_s, self._leaving_nodes),
            start_budget=self.budget,
            hooks=self,
        )
        ensure_ray()
        self.budget.renew()
        self._finalizer = end_with(owner, controller.stop, force=True)
        with OnFailure(self._finalizer):
            controller.start(as_fits=self._scaling.min_workers < self.max_workers)
        self._controller = controller

    def group_spec(self, initialization_hook: Callable[[], Any] | None) -> GroupSpec:
        """Return the settings with which the engine starts every group of workers."""
        num_gpus = self.spec.resources.num_gpus
        connection = self._config.connection(num_gpus)
        if isinstance(connection, PlacedConnection):
            connection.shares_gpus = self._shares_gpus
        elif self._shares_gpus and num_gpus > 0:
            connection = PlacedConnection(connection, shares_gpus=True)
        return replace(self.spec, connection=connection, initialization_hook=initialization_hook, relay=LogRelay())

    def stop(self, patience_s: float = 5) -> None:
        """Stop the workers and free their resources. Other actors and reservations are not affected.

        Args:
            patience_s: If above 0, workers shut down cleanly; otherwise, they are killed. In both cases, first wait a
                limited time for a checkpoint that a worker is sending.
        """
        controller, self._controller = self._controller, None
        run, self.current_run = self.current_run, None
        if run is not None:
            run.is_over = True  # ends iterators over the run's reports
        if controller is not None:
            self._finalizer.detach()
            controller.stop(force=patience_s <= 0)

    def expect_end(self, is_ending: bool) -> None:
        """Stop replacing lost workers if the program is about to end, or replace them again, for `Leaving`."""
        if self._controller is not None:
            self._controller.expect_end(is_ending)

    # ---------------------------------------------------------------------------------------------------- a function

    def function_spec(
        self, function: Callable[[], Any], score_attribute: str = "", make_session: Callable[..., Any] | None = None
    ) -> FunctionSpec:
        """Return a function with everything that a worker needs to run it.

        Args:
            function: The function, with its config bound.
            score_attribute: Key in a checkpoint whose value ranks the checkpoint.
            make_session: See `FunctionSpec`.
        """
        return FunctionSpec(
            function,
            self._backend.encode_data,
            score_attribute,
            self._is_detailed,
            explain=getattr(self._backend, "explain", None),  # a plug-in need not be a subclass of `Backend`
            make_session=make_session,
            num_ahead=self._num_ahead,
            is_elastic=self.spec.runs_on,
        )

    def check_free(self) -> None:
        """Check that the workers have started and that no function is running on them.

        Raises:
            InactiveWorkerGroupError: There are no workers.
            TrainBackendError: A function is running.
        """
        if self.controller and self.current_run is not None and not self.current_run.is_over:
            raise TrainBackendError(
                "A run is already active: iterate over its results to the end, for instance with "
                "`get_final_results(force=True)` of its iterator, or call `shutdown` and `start` again."
            )

    def abort(self) -> None:
        """Stop the function that is running on the workers. If no function is running, do nothing."""
        run, self.current_run = self.current_run, None
        if run is not None and self.is_started:
            run.abort()

    def preemption(self, ends_at_ms: int | None) -> PreemptionInfo | None:
        """Return the workers' nodes that Ray will take away, or all of the workers' nodes if the program ends.

        Args:
            ends_at_ms: Time at which the program ends, in milliseconds of Unix time; None if it does not end.
        """
        nodes = [info.node_id for info in self.group.infos]
        return preemption_of(nodes, drain_deadlines() if ends_at_ms is None else dict.fromkeys(nodes, ends_at_ms))

    def _leaving_nodes(self) -> frozenset[str]:
        """Return the nodes that the workers must leave now, because Ray will take them away soon.

        Return no nodes while a restart on other nodes would lose progress.
        """
        if self.current_run is not None and not self.current_run.is_over and not self.current_run.may_restart:
            return frozenset()
        nodes = draining_nodes()
        if nodes:
            self.checkpoints.flush()
        return nodes

    # ------------------------------------------------------------------------------------------------- the workers

    def ensure_workers(self) -> WorkerGroup:
        """Return the current workers. If they were killed, start new workers first.

        Raises:
            InactiveWorkerGroupError: There are no workers.
        """
        self.controller.ensure_group()
        return self.workers

    def replace_workers(self) -> None:
        """Kill all workers and start new workers.

        Raises:
            InactiveWorkerGroupError: There are no workers.
            TrainBackendError: A function is running.
        """
        self.check_free()
        self.controller.kill_group()
        self.budget.renew()
        self.ensure_workers()

    def gather(self, references: Sequence[Any]) -> list[Any]:
        """Wait for calls that were started on the workers, and return their results.

        If a worker died during a call, replace all workers, unless no retry is left.

        Args:
            references: The Ray object references of the calls' results.

        Raises:
            WorkerError: A function raised. The error is also an instance of the class that was raised.
            TrainingWorkerError: A worker died, and new workers have started.
            WorkersLostError: Workers died too often.
        """
        controller = self.controller
        try:
            return gather(references)
        except LostDuringCallError as lost:
            controller.kill_group()
            if self.budget.is_spent:
                self.budget.refuse()
                raise WorkersLostError(f"{lost}. {self.spec.words.when_spent}") from lost
            self.budget.pay_for_restart()
            self.ensure_workers()
            raise TrainingWorkerError(f"{lost}; new workers have started") from lost

    # ------------------------------------------------------------------------------- hooks that the engine calls

    def on_start(self, group: EngineGroup) -> GroupReport | None:
        """Let the plug-in connect the workers of a new group, and create the user's object in each worker.

        If a worker dies meanwhile, return a report about the lost worker.
        """
        try:
            workers = WorkerGroup.over(group, self.spec.resources)
            self._backend.on_start(workers, self._config)
            if self._make_object is not None:
                make_objects(self._make_object, group)
        except LostDuringCallError as lost:
            return lost.report
        self.group, self.workers, self._may_wait = group, workers, True
        self.joined = dict.fromkeys(group.infos, self.num_changes)
        self.num_started += 1
        return None

    def on_change(self, group: EngineGroup) -> None:
        """Note which workers a running group has gained, and create the user's object in them."""
        self.num_changes += 1
        self.joined = {info: self.joined.get(info, self.num_changes) for info in group.infos}
        self.workers.num_workers = len(group)
        try:
            if self._make_object is not None:
                make_objects(self._make_object, group)
        except LostDuringCallError as lost:  # only logged, because the next call recovers from the lost worker
            logger.warning("%s, while joining the group; the next call handles the loss", lost)

    def on_training_start(self) -> None:
        """Call the plug-in's `on_training_start` before a function starts."""
        hook = getattr(self._backend, "on_training_start", None)  # a plug-in need not be a subclass of `Backend`
        if hook is None:
            return
        try:
            hook(self.workers, self._config)
        except LostDuringCallError as lost:  # only logged, because the next call recovers from the lost worker
            logger.warning("%s, in `on_training_start`; the next call handles the loss", lost)

    def on_failure(self, diagnosis: Diagnosis) -> None:
        """Pass on the diagnosis of a failure. The engine then repeats the failed call."""
        self._on_failure(diagnosis)

    def on_end(self, group: EngineGroup) -> None:
        """Wait until a checkpoint that a worker is sending has arrived, before the group's workers are stopped.

        Later calls for the same group do not wait. If the worker dies, the wait ends immediately.
        """
        self.replicas.start = ()
        if self._may_wait:
            self._may_wait = False
            is_interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
            self.checkpoints.await_arrival(_ARRIVAL_AT_CTRL_C_S if is_interrupted else _ARRIVAL_S)

    def on_stop(self, group: EngineGroup) -> None:
        """Call the plug-in's `on_shutdown`, which disconnects the workers. If it fails, log the error."""
        if self.num_started and group is self.group:
            with failure_logged(logger.warning, "`on_shutdown` failed; stopping the workers anyway: %s"):
                self._backend.on_shutdown(self.workers, self._config)


def check_elastic(config: BackendConfig, scaling: ScalingConfig, num_restarts: float) -> None:
    """Check that functions can continue in place after a failure, if the config requests this with `elastic=True`.

    Args:
        config: Configures how the workers are connected.
        scaling: Number and resources of the workers.
        num_restarts: Number of restarts before a failure is raised as an error.

    Raises:
        InvalidCountError: The number of workers is not set.
        ValueError: With these arguments, functions cannot continue without a restart after a failure. Or spare workers
            were requested without `elastic=True`, or their number is out of range.
    """
    least, most = scaling.worker_range
    check_num_workers("spare_workers", scaling.spare_workers, hint="They wait to step in for lost ones.", least=0)
    if scaling.spare_workers and not scaling.elastic:
        raise ValueError(
            f"`spare_workers={scaling.spare_workers}` without `elastic=True`: they step in where functions go on after "
            "a failure. Pass both, or neither."
        )
    if not scaling.elastic:
        return
    if least == most:
        raise ValueError(
            f"`elastic=True` and `num_workers={most}`: after a failure, fewer workers continue, so pass the "
            f"least and the most, such as `num_workers=({max(1, most - 1)}, {most})`."
        )
    if not config.can_regroup(scaling.num_gpus_per_worker):
        raise ValueError(
            f"`elastic=True` with `{config!r}`: only workers that `TorchConfig` connects with gloo can form a new "
            'group while a function runs. Pass `TorchConfig(backend="gloo")`, or leave `elastic` out.'
        )
    if not num_restarts:
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
