"""Lets developers and plug-ins run functions on workers, and call the objects in workers through handles.

This module is a thin layer over the engine's groups. If a worker dies, nothing is retried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

from raysgd.core.arguments import check_amount
from raysgd.core.cluster.resources import Resources, num_fitting
from raysgd.core.engine.gathering import Listener
from raysgd.core.engine.group import WorkerGroup as EngineGroup
from raysgd.core.engine.platform import RemoteWorker
from raysgd.core.engine.policies import classify
from raysgd.core.engine.shared.interface import GroupSpec, NoConnection
from raysgd.core.engine.shared.types import GroupReport
from raysgd.core.engine.worker import WorkerProcess
from raysgd.core.worker_errors import worker_error
from raysgd.exceptions import (
    InactiveWorkerGroupError,
    OnFailure,
    TrainBackendError,
    TrainingWorkerError,
    WorkersLostError,
)
from raysgd.train._worker.function_replica import FunctionReplica

__all__ = ["Worker", "WorkerGroup", "WorkerMetadata"]

_RELEASE_S = 30.0


@dataclass(frozen=True)
class WorkerMetadata:
    """Describes where a worker runs: its node, host and GPUs."""

    node_id: str
    node_ip: str
    hostname: str
    gpu_ids: list[int | str]


class LostDuringCallError(TrainingWorkerError):
    """Raised if a worker died while it was running a function."""

    def __init__(self, report: GroupReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        ranks = ", ".join(map(str, classify(self.report).ranks))
        return f"worker {ranks} died while a function was run on it"


@dataclass(frozen=True)
class WorkerHandle:
    """Represents the user's object in a worker: `handle.method.remote(...)` returns a Ray reference to the result.

    Attributes:
        ray_actor: Ray's actor handle of the worker's process, for example for `ray.kill`. It has the methods of the
            worker, not the methods of the object.
    """

    group: EngineGroup
    rank: int
    ray_actor: Any

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        return RemoteMethod(self, name)


@dataclass(frozen=True)
class RemoteMethod:
    """A method of the user's object in a worker: `handle.method`."""

    handle: WorkerHandle
    name: str

    def __call__(self) -> None:
        """Stop the worker's process immediately, even during a call. Only `handle.kill` can be called without `remote`.

        Raises:
            TypeError: The method is not `kill`.
        """
        if self.name != "kill":
            raise TypeError(f"`{self.name}` is in another process: call `handle.{self.name}.remote(...)`.")
        import ray

        ray.kill(self.handle.ray_actor)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the method in the worker and return a Ray reference to its result.

        If the worker dies, `ray.get` of the reference raises an error.

        Raises:
            InactiveWorkerGroupError: The workers were stopped or replaced after the handle was created.
        """
        group, rank = self.handle.group, self.handle.rank
        if group.is_ended:
            raise InactiveWorkerGroupError(
                f"The worker of rank {rank} that this handle belongs to has stopped: get a new handle, `group[{rank}]`."
            )
        if self.name.endswith("__execute"):  # the name under which old programs call functions on workers
            return group.submit(rank, WorkerProcess.execute, *args, **kwargs)
        return group.submit(rank, WorkerProcess.host, FunctionReplica.call_object, self.name, *args, **kwargs)


@dataclass(frozen=True)
class Worker:
    """A worker, described by its handle and the node that it runs on."""

    actor: WorkerHandle
    metadata: WorkerMetadata


class WorkerGroup:
    """A group of worker processes on which you can run functions.

    Args:
        num_workers: Number of workers to start.
        num_cpus_per_worker: CPUs per worker.
        num_gpus_per_worker: GPUs per worker.
        additional_resources_per_worker: Other resources per worker.
        actor_cls: Class of an object that every worker creates. You use the object through its handle.
        actor_cls_args: Positional arguments for the class.
        actor_cls_kwargs: Keyword arguments for the class.
        placement_group: Source of the resources: your own placement group with enough resources for all workers,
            "default", or None. "default" uses the placement group of this process if it has one, else a new placement
            group. None always creates a new placement group.

    Raises:
        ValueError: The number of workers is not positive, a resource is negative, arguments were passed without a
            class, or your placement group does not have enough bundles that fit a worker.
        ReservationTimeoutError: The cluster did not grant the resources. This is also a `TimeoutError`.
        WorkerError: The class raised. The error is also an instance of the class that was raised.
        WorkersLostError: A worker process died while it started.
    """

    def __init__(
        self,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        additional_resources_per_worker: Mapping[str, float] | None = None,
        actor_cls: Callable[..., Any] | None = None,
        actor_cls_args: Sequence[Any] | None = None,
        actor_cls_kwargs: Mapping[str, Any] | None = None,
        placement_group: Any = "default",
    ) -> None:
        if num_workers <= 0:
            raise ValueError(f"`num_workers={num_workers!r}`: need at least 1.")
        check_amount("num_cpus_per_worker", num_cpus_per_worker)
        check_amount("num_gpus_per_worker", num_gpus_per_worker)
        if actor_cls is None and (actor_cls_args or actor_cls_kwargs):
            raise ValueError("`actor_cls_args` and `actor_cls_kwargs` need an `actor_cls`, which is missing.")
        self.num_workers = num_workers
        self.num_cpus_per_worker = num_cpus_per_worker
        self.num_gpus_per_worker = num_gpus_per_worker
        self.additional_resources_per_worker = additional_resources_per_worker
        self._placement_group = placement_group
        make: Callable[..., Any] | None = actor_cls
        self._make_object = (
            partial(make, *(actor_cls_args or ()), **(actor_cls_kwargs or {})) if make is not None else None
        )
        self._is_borrowed = False
        self._groups: list[EngineGroup] = []
        self.start()

    @classmethod
    def over(cls, group: EngineGroup, resources: Resources) -> WorkerGroup:
        """Return a `WorkerGroup` with the workers of a `BackendExecutor`, which starts and stops them."""
        face = cls.__new__(cls)
        face.num_workers = len(group)
        face.num_cpus_per_worker = resources.num_cpus
        face.num_gpus_per_worker = resources.num_gpus
        face.additional_resources_per_worker = resources.custom or None
        face._placement_group, face._make_object = "default", None
        face._is_borrowed, face._groups = True, [group]
        return face

    @property
    def workers(self) -> list[Worker]:
        """The current workers, each with its handle and node."""
        found = []
        for group, rank in self._places:
            info, process = group.infos[rank], cast(RemoteWorker, group.workers[rank])
            gpu_ids: list[int | str] = [int(each) if each.isdigit() else each for each in info.gpu_ids]
            metadata = WorkerMetadata(info.node_id, info.node_ip, host_of(info.node_id), gpu_ids)
            found.append(Worker(WorkerHandle(group, rank, process.actor), metadata))
        return found

    @property
    def _places(self) -> list[tuple[EngineGroup, int]]:
        """For each worker, the engine's group that it belongs to, and its rank there."""
        return [(group, rank) for group in self._groups for rank in range(len(group.workers)) if rank not in group.gone]

    def start(self) -> None:
        """Start `num_workers` workers.

        Raises:
            RuntimeError: Workers have already started.
            TrainBackendError: The workers belong to an executor or a trainer, whose `start` starts them.
        """
        if self._is_borrowed:
            raise TrainBackendError(
                "These workers belong to a `BackendExecutor`: call its `start`, or its `Trainer`'s."
            )
        if len(self):
            raise RuntimeError("The workers have already started; call `shutdown` first, or `add_workers` for more.")
        self.add_workers(self.num_workers)

    def add_workers(self, num_workers: int) -> None:
        """Start more workers. Their indexes follow those of the existing workers.

        Raises:
            ValueError: Your placement group does not have enough bundles that fit a worker.
        """
        resources = Resources(
            self.num_cpus_per_worker, self.num_gpus_per_worker, dict(self.additional_resources_per_worker or {})
        )
        self._check_room(resources, len(self) + num_workers)
        spec = GroupSpec(NoConnection(), FunctionReplica, resources, captures=False, within=self._placement_group)
        group = EngineGroup(spec, num_workers)
        report = group.start()
        if not report.ok:
            diagnosis = classify(report)
            if diagnosis.kind == "user":
                raise worker_error(diagnosis.faults)
            raise WorkersLostError("A worker process died while it started.") from diagnosis.faults[0].error
        if self._make_object is not None:
            with OnFailure(group.kill):
                make_objects(self._make_object, group)
        self._groups.append(group)

    def _check_room(self, need: Resources, num_workers: int) -> None:
        """Check that the user's placement group has resources for all workers. Workers without resources wait forever.

        Args:
            need: Resources of one worker.
            num_workers: Number of workers, including those that are running.
        """
        bundles = getattr(self._placement_group, "bundle_specs", None)
        if bundles is None:
            return
        most = sum(num_fitting(bundle, need) for bundle in bundles)
        if most < num_workers:
            raise ValueError(
                f"`placement_group` has resources for {most} workers of {need.bundle()}, and you requested "
                f"{num_workers}: its bundles are {list(bundles)}."
            )

    def remove_workers(self, worker_indexes: Sequence[int]) -> None:
        """Stop the workers at these indexes. The indexes of later workers decrease accordingly."""
        places = self._places
        for group, rank in [places[index] for index in worker_indexes]:
            group.remove_workers([rank])

    def shutdown(self, patience_s: float = 5) -> None:
        """Stop the workers. With `patience_s` above 0, they shut down cleanly; otherwise, they are killed.

        Raises:
            TrainBackendError: The workers belong to an executor or a trainer, whose `shutdown` stops them.
        """
        if self._is_borrowed:
            raise TrainBackendError(
                "These workers belong to a `BackendExecutor`: call its `shutdown`, or its `Trainer`'s."
            )
        groups, self._groups = self._groups, []
        for group in groups:
            if patience_s > 0:
                group.stop(_RELEASE_S)
            else:
                group.kill(_RELEASE_S)

    def execute_async(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Start `func` on all workers and return the Ray object references, in worker order.

        Raises:
            RuntimeError: The group has no workers.
        """
        if not len(self):
            whose = (
                " of the `BackendExecutor`, or of its `Trainer`, and get its group again" if self._is_borrowed else ""
            )
            raise RuntimeError(f"There are no workers: the group was shut down. Call `start`{whose}.")
        return [group.submit(rank, WorkerProcess.execute, func, *args, **kwargs) for group, rank in self._places]

    def execute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `func` on all workers and return the results, in worker order.

        Raises:
            WorkerError: `func` raised. The error is also an instance of the class that was raised.
            TrainingWorkerError: A worker died.
        """
        return gather(self.execute_async(func, *args, **kwargs))

    def execute_single_async(self, worker_index: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start `func` on one worker and return the Ray object reference.

        Raises:
            ValueError: The worker does not exist.
        """
        places = self._places
        if not -len(places) <= worker_index < len(places):
            raise ValueError(f"`worker_index={worker_index}`: there are {len(places)} workers, from 0.")
        group, rank = places[worker_index]
        return group.submit(rank, WorkerProcess.execute, func, *args, **kwargs)

    def execute_single(self, worker_index: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func` on one worker and return the result.

        The errors are those of `execute_single_async` and `execute`.
        """
        return gather([self.execute_single_async(worker_index, func, *args, **kwargs)])[0]

    def __len__(self) -> int:
        return len(self._places)


@cache
def host_of(node_id: str) -> str:
    """Return the host name of a node of Ray's cluster."""
    import ray

    hosts: dict[str, str] = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    return hosts[node_id]


def gather(references: Sequence[Any]) -> list[Any]:
    """Wait for the results of calls on workers, and return them in order.

    Args:
        references: Ray object references of the calls' results.

    Raises:
        LostDuringCallError: A worker died.
        WorkerError: The function raised. The error is also an instance of the class that was raised.
    """
    outcomes = Listener(dict(enumerate(references))).listen()
    report = GroupReport(tuple(outcomes[index] for index in range(len(references))))
    if report.ok:
        return report.values
    diagnosis = classify(report)
    if diagnosis.kind == "user":
        raise worker_error(diagnosis.faults)
    raise LostDuringCallError(report)


def make_objects(make_object: Callable[[], Any], group: EngineGroup) -> None:
    """Create an object of the user's class in each worker of a group that has none yet.

    Args:
        make_object: Function that creates the object.
        group: The workers.

    Raises:
        LostDuringCallError: A worker died.
        WorkerError: The class raised. The error is also an instance of the class that was raised.
    """
    ranks = range(len(group))
    gather([group.submit(rank, WorkerProcess.host, FunctionReplica.make_object, make_object) for rank in ranks])
