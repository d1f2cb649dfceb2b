"""A group of the engine that calls a plug-in's hooks when it is started and stopped, and makes users' objects."""

from __future__ import annotations

import logging
from collections.abc import Callable

from raysgd.engine.group_spec import GroupSpec
from raysgd.engine.types import GroupReport
from raysgd.engine.worker_group import WorkerGroup as EngineGroup
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.worker_group import LostDuringCallError, WorkerGroup, WorkerObject

logger = logging.getLogger(__name__)


class HookedGroup(EngineGroup):
    """Calls `Backend.on_start` when its workers run, and `Backend.on_shutdown` before they are stopped.

    Args:
        spec: What it is started from.
        num_workers: How many workers.
        backend: The plug-in.
        config: What the plug-in was chosen with.
        on_started: Told of the face with which the group can be reached.
        worker_object: What every worker makes an object of, as the last step of its start; None for nothing.
        before_end: Called before the workers are ended, in whatever way, once.
    """

    def __init__(
        self,
        spec: GroupSpec,
        num_workers: int,
        backend: Backend,
        config: BackendConfig,
        on_started: Callable[[WorkerGroup], None],
        worker_object: WorkerObject | None = None,
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec, num_workers)
        self._resources = spec.resources
        self._backend, self._config = backend, config
        self._on_started = on_started
        self._worker_object = worker_object
        self._before_end: Callable[[], None] | None = before_end
        self._face: WorkerGroup | None = None

    def start(self, reservation_timeout_s: float | None = None) -> GroupReport:
        """Starts the workers, then lets the plug-in connect them. A death over that is a failed start."""
        report = super().start(reservation_timeout_s)
        if not report.ok:
            return report
        try:
            self._face = WorkerGroup.of(self, self._resources)
            self._backend.on_start(self._face, self._config)
            if self._worker_object is not None:
                self._face.invite(self._worker_object)
        except LostDuringCallError as lost:
            self.kill()
            return lost.report
        except BaseException:
            self.kill()
            raise
        self._on_started(self._face)
        return report

    def stop(self, timeout_s: float) -> None:
        """Lets the plug-in say goodbye, whatever comes of that, then stops the workers."""
        try:
            self._prepare_end()
            if self._face is not None:
                self._backend.on_shutdown(self._face, self._config)
        except Exception as error:
            logger.warning("`on_shutdown` failed; stopping the workers anyway: %s", error)
        finally:
            super().stop(timeout_s)

    def abandon(self) -> None:
        """From another thread: lets whoever starts or uses the group come to an end, but for what has to come first."""
        try:
            self._prepare_end()
        finally:
            super().abandon()

    def kill(self, timeout_s: float = 5.0) -> None:
        """Ends the workers at once, but for what has to come first."""
        try:
            self._prepare_end()
        finally:
            super().kill(timeout_s)

    def _prepare_end(self) -> None:
        prepare, self._before_end = self._before_end, None
        if prepare is not None:
            prepare()
