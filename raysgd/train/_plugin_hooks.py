"""Hooks that the engine calls when a group of workers for a training function starts, changes and ends.

They call the plug-in (`Backend`), which connects the workers, and create the user's object in each worker.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from raysgd.core.engine.group import GroupHooks
from raysgd.core.engine.group import WorkerGroup as EngineGroup
from raysgd.core.engine.policies import Diagnosis
from raysgd.core.engine.shared.types import GroupReport, Resources, WorkerInfo
from raysgd.exceptions import failure_logged
from raysgd.train._worker.function_replica import FunctionReplicas
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.worker_group import LostDuringCallError, WorkerGroup, describe, make_objects

logger = logging.getLogger(__name__)

_ARRIVAL_S = 30.0  # how long to wait for a checkpoint that a worker is sending before the worker is stopped
_ARRIVAL_AT_CTRL_C_S = 3.0  # how long to wait for the checkpoint after Ctrl-C; a second Ctrl-C ends the wait


class PluginHooks(GroupHooks):
    """Calls a plug-in, such as `TorchBackend`, for each worker group, and tracks the current workers.

    Attributes:
        num_started: Number of groups that were started.
        num_changes: Number of times that the workers of a running group changed.
        joined: For each worker that joined a running group, the value of `num_changes` after it joined.
        replicas: Creates the `FunctionReplica` in each worker, which runs the function.

    Args:
        backend: The plug-in.
        config: The configuration that selected the plug-in.
        resources: Resources of one worker.
        await_checkpoint: Function that waits until no worker is sending a checkpoint to the driver. Its argument is the
            maximum number of seconds to wait.
        make_object: Function that creates the user's object in every worker after the worker was started; None for no
            object.
        tell_failure: Function to call with the diagnosis of a failure before the failed call is repeated.
    """

    def __init__(
        self,
        backend: Backend,
        config: BackendConfig,
        resources: Resources,
        await_checkpoint: Callable[[float], None] = lambda timeout_s: None,
        make_object: Callable[[], Any] | None = None,
        tell_failure: Callable[[Diagnosis], None] = lambda diagnosis: None,
    ) -> None:
        self.replicas = FunctionReplicas()
        self._backend, self._config = backend, config
        self._resources = resources
        self._await_checkpoint = await_checkpoint
        self._make_object = make_object
        self._tell_failure = tell_failure
        self._group: EngineGroup | None = None
        self._workers: WorkerGroup | None = None
        self._infos: list[WorkerInfo] = []
        self._may_wait = True
        self.num_started = self.num_changes = 0
        self.joined: dict[WorkerInfo, int] = {}

    @property
    def group(self) -> EngineGroup:
        """The engine's group of the current workers. If no workers are running, the group of the last workers."""
        assert self._group is not None, "no group was started"
        return self._group

    @property
    def workers(self) -> WorkerGroup:
        """The current workers, as the `WorkerGroup` that plug-ins and users get."""
        assert self._workers is not None, "no group was started"
        return self._workers

    def store(self, value: Any) -> Any:
        """Store a value in Ray's object store, from which workers can fetch it, and return the object reference."""
        return self.group.store(value).reference

    def on_start(self, group: EngineGroup) -> GroupReport | None:
        """Let the plug-in connect the workers of a new group, and create the user's object in each worker.

        If a worker dies meanwhile, return a report about the lost worker.
        """
        try:
            workers = WorkerGroup.over(group, self._resources)
            self._backend.on_start(workers, self._config)
            if self._make_object is not None:
                make_objects(self._make_object, workers.workers)
        except LostDuringCallError as lost:
            return lost.report
        self._group, self._workers, self._may_wait = group, workers, True
        self._infos = list(group.infos)
        self.num_started += 1
        return None

    def on_change(self, group: EngineGroup) -> None:
        """Update the ranks in `workers` after a running group has lost or gained workers. Set up the new workers."""
        known = dict(zip(self._infos, self.workers.workers, strict=True))
        new = [rank for rank, info in enumerate(group.infos) if info not in known]
        self.num_changes += 1
        for rank in new:
            self.joined.setdefault(group.infos[rank], self.num_changes)
        try:
            made = describe(group, new)
            if self._make_object is not None:
                make_objects(self._make_object, made)
            known |= {group.infos[rank]: worker for rank, worker in zip(new, made, strict=True)}
        except LostDuringCallError as lost:  # only logged, because the next call recovers from the lost worker
            logger.warning("%s, while joining the group; the next call handles the loss", lost)
        self.workers.follow([known.get(info) for info in group.infos])
        self._infos = [info for info in group.infos if info in known]

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
        self._tell_failure(diagnosis)

    def on_end(self, group: EngineGroup) -> None:
        """Wait until a checkpoint that a worker is sending has arrived, before the group's workers are stopped.

        Later calls for the same group do not wait. If the worker dies, the wait ends immediately.
        """
        self.replicas.start = ()
        if not self._may_wait:
            return
        self._may_wait = False
        is_interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        self._await_checkpoint(_ARRIVAL_AT_CTRL_C_S if is_interrupted else _ARRIVAL_S)

    def on_stop(self, group: EngineGroup) -> None:
        """Call the plug-in's `on_shutdown`, which disconnects the workers. If it fails, log the error."""
        if group is not self._group:
            return
        with failure_logged(logger.warning, "`on_shutdown` failed; stopping the workers anyway: %s"):
            self._backend.on_shutdown(self.workers, self._config)
