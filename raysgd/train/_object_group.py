"""Connected workers with an object of the user's class in each."""

from __future__ import annotations

from raysgd.train._rules.worker_handles import WorkerHandle
from raysgd.train.executor import BackendExecutor
from raysgd.train.worker_group import WorkerGroup


class TrainWorkerGroup:
    """Connected workers, each with an object of the user's class. `group[0].method.remote(...)` calls it.

    When a worker dies, `ray.get` of a call to it raises Ray's `RayActorError`, and calls to others may wait for it
    forever. `restart` then brings new workers; what the objects knew is lost, unless the class keeps it elsewhere.
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
