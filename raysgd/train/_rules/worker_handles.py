"""Handles on single workers: where each one lives, and the object of the user's class in it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysgd.engine.gathering import Listener
from raysgd.engine.policies import classify
from raysgd.engine.shared.types import GroupReport
from raysgd.exceptions import InactiveWorkerGroupError, TrainingWorkerError, worker_error
from raysgd.train._worker.function_replica import FunctionReplica

if TYPE_CHECKING:  # workers load this module, and none of the driver's
    from raysgd.engine.group import WorkerGroup


@dataclass(frozen=True)
class WorkerMetadata:
    """The place of a worker."""

    node_id: str
    node_ip: str
    hostname: str
    gpu_ids: list[int | str]


class LostDuringCallError(TrainingWorkerError):
    """A worker died over a function that was run on it."""

    def __init__(self, report: GroupReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        ranks = ", ".join(map(str, classify(self.report).ranks))
        return f"worker {ranks} died while a function was run on it"


@dataclass(frozen=True)
class WorkerHandle:
    """Stands for the object in a worker: `handle.method.remote(...)` returns a Ray reference to the result.

    Attributes:
        ray_actor: Ray's own handle on the worker's process, for `ray.kill` and whatever else takes one. Its methods are
            the worker's, not those of the object.
    """

    group: WorkerGroup
    rank: int
    ray_actor: Any

    @property
    def kill(self) -> KillMethod:
        """`handle.kill()` ends the worker's process at once; `handle.kill.remote()` calls the object's `kill`."""
        return KillMethod(self.group, self.rank, "kill", self.ray_actor)

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        return RemoteMethod(self.group, self.rank, name)


@dataclass(frozen=True)
class RemoteMethod:
    """One method of the object in a worker."""

    group: WorkerGroup
    rank: int
    name: str

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Starts the method and returns a Ray reference to its result; `ray.get` of it is an error if the worker dies.

        Raises:
            InactiveWorkerGroupError: The workers were ended or replaced since the handle was made.
        """
        if self.group.is_ended:
            raise InactiveWorkerGroupError(
                f"The worker of rank {self.rank} that this handle belongs to has stopped: get a new handle, "
                f"`group[{self.rank}]`."
            )
        if self.name.endswith("__execute"):  # as classes that the old library mixed in called it
            return self.group.submit(self.rank, "execute", *args, **kwargs)
        return self.group.submit(self.rank, "host", call_method, self.name, *args, **kwargs)


@dataclass(frozen=True)
class KillMethod(RemoteMethod):
    """The method `kill` of the object in a worker; called itself, it ends the worker's process."""

    ray_actor: Any

    def __call__(self) -> None:
        """Ends the process at once, whatever it is doing, as `ray.kill` does."""
        import ray

        ray.kill(self.ray_actor)


@dataclass(frozen=True)
class Worker:
    """One worker: its handle, and where it lives."""

    actor: WorkerHandle
    metadata: WorkerMetadata


@dataclass(frozen=True)
class WorkerObject:
    """A class of the user's, of which every worker makes an object with these arguments."""

    made_by: type[Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def make_worker_object(replica: FunctionReplica, worker_object: WorkerObject) -> None:
    """Makes the object of this worker."""
    replica.worker_object = worker_object.made_by(*worker_object.args, **worker_object.kwargs)


def call_method(replica: FunctionReplica, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of that object.

    Raises:
        AttributeError: There is none of that name.
    """
    return getattr(replica.worker_object, name)(*args, **kwargs)


def describe_process() -> tuple[str, Any]:
    """The name of this worker's host, and Ray's handle on this worker."""
    import ray

    return socket.gethostname(), ray.get_runtime_context().current_actor


def describe(group: WorkerGroup, ranks: Sequence[int] | None = None) -> list[Worker]:
    """The workers of a group, or those of some ranks, with where they live; raises as `gather`."""
    asked = range(len(group)) if ranks is None else ranks
    processes = gather([group.submit(rank, "execute", describe_process) for rank in asked])
    infos = [group.infos[rank] for rank in asked]
    return [
        Worker(
            WorkerHandle(group, rank, ray_actor),
            WorkerMetadata(info.node_id, info.node_ip, host, [int(g) if g.isdigit() else g for g in info.gpu_ids]),
        )
        for rank, info, (host, ray_actor) in zip(asked, infos, processes, strict=True)
    ]


def gather(references: Sequence[Any]) -> list[Any]:
    """The results of calls that were started, in order.

    Raises:
        LostDuringCallError: A worker died.
        WorkerError: The function raised; of that class too.
    """
    outcomes = Listener(dict(enumerate(references))).listen()
    report = GroupReport(tuple(outcomes[index] for index in range(len(references))))
    if report.ok:
        return report.values
    diagnosis = classify(report)
    if diagnosis.kind == "user":
        raise worker_error(diagnosis.faults)
    raise LostDuringCallError(report)


def make_objects(worker_object: WorkerObject, workers: Sequence[Worker]) -> None:
    """Makes an object of the user's class in each of these workers; raises as `gather`."""
    gather(
        [worker.actor.group.submit(worker.actor.rank, "host", make_worker_object, worker_object) for worker in workers]
    )
