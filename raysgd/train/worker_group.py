"""The workers as developers see them: functions run on all of them or on one.

A thin face over the engine's groups. Nothing is retried here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysgd._arguments import check_amount
from raysgd.engine.group import WorkerGroup as EngineGroup
from raysgd.engine.policies import classify, num_fitting
from raysgd.engine.shared.connection import NoConnection
from raysgd.engine.shared.group_spec import GroupSpec
from raysgd.engine.shared.types import Resources
from raysgd.exceptions import TrainBackendError, WorkersLostError, worker_error
from raysgd.train._rules.worker_handles import Worker, WorkerMetadata, WorkerObject, describe, gather, make_objects
from raysgd.train._worker.function_replica import FunctionReplica

__all__ = ["Worker", "WorkerGroup", "WorkerMetadata"]

_RELEASE_S = 30.0


class WorkerGroup:
    """Workers that run functions.

    Args:
        num_workers: How many to start.
        num_cpus_per_worker: CPUs for each.
        num_gpus_per_worker: GPUs for each.
        additional_resources_per_worker: Other resources for each.
        actor_cls: A class of which every worker makes an object, reached through its handle.
        actor_cls_args: Arguments for that.
        actor_cls_kwargs: Keyword arguments for that.
        placement_group: Where their resources come from: your own placement group with room for all; "default", the
            one that this process itself is in, else a new one; None, a new one in any case.

    Raises:
        ValueError: No workers, less than nothing for each, or arguments for no class.
        ReservationTimeoutError: The cluster did not grant the resources; a `TimeoutError`.
    """

    def __init__(
        self,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        additional_resources_per_worker: Mapping[str, float] | None = None,
        actor_cls: type[Any] | None = None,
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
        self._worker_object = (
            WorkerObject(actor_cls, tuple(actor_cls_args or ()), dict(actor_cls_kwargs or {})) if actor_cls else None
        )
        self._is_borrowed = False
        self._groups: list[EngineGroup] = []
        self.workers: list[Worker] = []
        self.start()

    @classmethod
    def of(cls, group: EngineGroup, resources: Resources) -> WorkerGroup:
        """A face for a group that an executor started and will stop."""
        face = cls.__new__(cls)
        face.num_workers = len(group)
        face.num_cpus_per_worker = resources.num_cpus
        face.num_gpus_per_worker = resources.num_gpus
        face.additional_resources_per_worker = resources.custom or None
        face._placement_group = "default"
        face._worker_object = None
        face._is_borrowed = True
        face._groups = []
        face.workers = describe(group)
        return face

    def start(self) -> None:
        """Starts `num_workers` workers.

        Raises:
            RuntimeError: There are workers already.
        """
        if self.workers:
            raise RuntimeError("The workers have already started; call `shutdown` first, or `add_workers` for more.")
        self.add_workers(self.num_workers)

    def add_workers(self, num_workers: int) -> None:
        """Starts more workers, behind those that there are.

        Raises:
            ValueError: The placement group that was given has too few bundles that hold a worker.
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
        self._groups.append(group)
        try:
            workers = describe(group)
            if self._worker_object is not None:
                make_objects(self._worker_object, workers)
            self.workers += workers
        except BaseException:
            self._groups.remove(group)
            group.kill()
            raise

    def _check_room(self, need: Resources, num_workers: int) -> None:
        """Ray would let workers wait for ever that a placement group can never hold."""
        bundles = getattr(self._placement_group, "bundle_specs", None)
        if bundles is None:
            return
        room = sum(num_fitting(bundle, need) for bundle in bundles)
        if room < num_workers:
            raise ValueError(
                f"`placement_group` has room for {room} workers of {need.bundle()}, and you requested {num_workers}: "
                f"its bundles are {list(bundles)}."
            )

    def make_objects(self, worker_object: WorkerObject) -> None:
        """Makes an object of the user's class in every worker, to be reached through its handle.

        Raises:
            WorkerError: The class raised; of that class too.
            TrainingWorkerError: A worker died.
        """
        make_objects(worker_object, self.workers)

    def remove_workers(self, worker_indexes: Sequence[int]) -> None:
        """Ends the workers at these indexes; those behind them move up."""
        leaving = [self.workers[index] for index in worker_indexes]
        for worker in leaving:
            worker.actor.group.remove_workers([worker.actor.rank])
        self.workers = [worker for worker in self.workers if worker not in leaving]

    def follow(self, workers: Sequence[Worker | None]) -> None:
        """Has those workers, by rank, from now on: the group consists of them. None stands for one that died."""
        self.workers = [
            replace(each, actor=replace(each.actor, rank=rank)) for rank, each in enumerate(workers) if each is not None
        ]
        self.num_workers = len(workers)

    def shutdown(self, patience_s: float = 5) -> None:
        """Ends the workers; with `patience_s` above 0 they may close what they have first.

        Raises:
            TrainBackendError: They are those of an executor or a trainer, whose own `shutdown` ends them.
        """
        if self._is_borrowed:
            raise TrainBackendError(
                "These workers belong to a `BackendExecutor`: call its `shutdown`, or its `Trainer`'s."
            )
        groups, self._groups, self.workers = self._groups, [], []
        for group in groups:
            if patience_s > 0:
                group.stop(_RELEASE_S)
            else:
                group.kill(_RELEASE_S)

    def execute_async(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Starts `func` on all workers; returns Ray's references, in order.

        Raises:
            RuntimeError: There are no workers.
        """
        if not self.workers:
            raise RuntimeError("There are no workers: the group was shut down. Call `start`.")
        return [self._submit(worker, func, *args, **kwargs) for worker in self.workers]

    def execute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Runs `func` on all workers and returns the results in order.

        Raises:
            WorkerError: `func` raised; of that class too.
            TrainingWorkerError: A worker died.
        """
        return gather(self.execute_async(func, *args, **kwargs))

    def execute_single_async(self, worker_index: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts `func` on one worker; returns Ray's reference.

        Raises:
            ValueError: There is no such worker.
        """
        if worker_index >= len(self.workers):
            raise ValueError(f"`worker_index={worker_index}`: there are {len(self.workers)} workers, from 0.")
        return self._submit(self.workers[worker_index], func, *args, **kwargs)

    def execute_single(self, worker_index: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `func` on one worker; see `execute`."""
        return gather([self.execute_single_async(worker_index, func, *args, **kwargs)])[0]

    def _submit(self, worker: Worker, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return worker.actor.group.submit(worker.actor.rank, "execute", func, *args, **kwargs)

    def __len__(self) -> int:
        return len(self.workers)
