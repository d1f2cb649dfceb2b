"""Hooks for the workers that run a training function: call the plug-in (`Backend`) when a worker group starts and ends.

The hooks also create the user's object in each worker.
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

_ARRIVAL_S = 30.0  # how long to wait for a checkpoint in transit before its worker is stopped
_ARRIVAL_AT_CTRL_C_S = 3.0  # how long to wait instead after Ctrl-C; a second Ctrl-C ends the wait


class PluginHooks(GroupHooks):
    """Calls a plug-in, such as `TorchBackend`, for each worker group, and tracks the current workers.

    Attributes:
        num_started: Number of groups that were started.
        num_changes: Number of times that the workers of a running group changed.
        joined: For each worker that joined a running group, the value of `num_changes` after it joined.
        replicas: Creates the workers' replicas.

    Args:
        backend: The plug-in.
        config: The configuration that selected the plug-in.
        resources: Resources of one worker.
        await_checkpoint: Waits until no checkpoint is in transit from a worker to the driver, up to the given number
            of seconds.
        make_object: Creates the user's object in every worker, as the last step of its start; None for no object.
        tell_failure: Called with the diagnosis of a failure before the failed call is repeated.
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
        """The engine's group of the current workers, or of the previous workers if none are running."""
        assert self._group is not None, "no group was started"
        return self._group

    @property
    def workers(self) -> WorkerGroup:
        """The current workers, in the form that plug-ins and users see."""
        assert self._workers is not None, "no group was started"
        return self._workers

    def store(self, value: Any) -> Any:
        """Store a value where workers can fetch it, and return the Ray object reference."""
        return self.group.store(value).reference

    def on_start(self, group: EngineGroup) -> GroupReport | None:
        """Let the plug-in connect the workers. If a worker dies meanwhile, return a report about the lost worker."""
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
        """Update `workers` after a group changed in place: the ranks of the remaining workers, and the new workers."""
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
        except LostDuringCallError as lost:  # not raised, because the next call fails for the same reason and recovers
            logger.warning("%s, while joining the group; the next call handles the loss", lost)
        self.workers.follow([known.get(info) for info in group.infos])
        self._infos = [info for info in group.infos if info in known]

    def on_training_start(self) -> None:
        """Notify the plug-in that a function is about to start."""
        hook = getattr(self._backend, "on_training_start", None)  # plug-ins need not derive from our base class
        if hook is None:
            return
        try:
            hook(self.workers, self._config)
        except LostDuringCallError as lost:  # not raised, because the next call fails for the same reason and recovers
            logger.warning("%s, in `on_training_start`; the next call handles the loss", lost)

    def on_failure(self, diagnosis: Diagnosis) -> None:
        """Report that the call is repeated, and why."""
        self._tell_failure(diagnosis)

    def on_end(self, group: EngineGroup) -> None:
        """Before the group's workers stop, wait for a checkpoint in transit from a worker, but only once per group.

        If that worker dies, the wait ends immediately.
        """
        self.replicas.start = ()
        if not self._may_wait:
            return
        self._may_wait = False
        is_interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        self._await_checkpoint(_ARRIVAL_AT_CTRL_C_S if is_interrupted else _ARRIVAL_S)

    def on_stop(self, group: EngineGroup) -> None:
        """Let the plug-in shut down. If it fails, the workers are stopped anyway."""
        if group is not self._group:
            return
        with failure_logged(logger.warning, "`on_shutdown` failed; stopping the workers anyway: %s"):
            self._backend.on_shutdown(self.workers, self._config)
