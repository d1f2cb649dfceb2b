"""Validations of checkpoints in tasks of Ray, one after the other, while the training goes on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.reports import ReportedCheckpointStatus, ValidationConfig, ValidationFn, ValidationTaskConfig

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class Validations:
    """Validates the checkpoints of a run. Each of them is settled once: validated, failed or out of time.

    Args:
        config: What the trainer was given; None where no report asks for a validation.
        settle: Called in the driver with a checkpoint, its metrics and its status.

    Raises:
        ValueError: Ray does not know an option in `ray_remote_kwargs`.
    """

    def __init__(
        self,
        config: ValidationConfig | None,
        settle: Callable[[Checkpoint, Mapping[str, Any], ReportedCheckpointStatus], None],
    ) -> None:
        self._config, self._settle = config, settle
        self._task: Any = _task_of(config) if config is not None else None
        self._waiting: deque[tuple[Checkpoint, ValidationTaskConfig]] = deque()
        self._running: Any = None
        self._deadline: float | None = None

    def add(self, checkpoint: Checkpoint, wanted: bool | ValidationTaskConfig) -> None:
        """Take in a checkpoint that is where it stays."""
        assert self._config is not None, "else no worker reports that it wants this"
        self._waiting.append((checkpoint, self._config.merged(wanted)))
        self.poll()

    def poll(self, wait_s: float = 0.0) -> bool:
        """End the validation that is over and begin the next one; return whether there is still something to do.

        Args:
            wait_s: How long to wait for the one that runs.
        """
        if self._running is not None:
            import ray

            done, _ = ray.wait([self._running], timeout=wait_s)
            if done:
                self._end(*_outcome(done[0], self._waiting[0][0]))
            elif self._deadline is not None and time.monotonic() > self._deadline:
                self._time_out()
        if self._running is None and self._waiting:
            self._begin()
        return bool(self._waiting)

    def finish(self) -> None:
        """Wait until all checkpoints are settled."""
        try:
            if self._waiting:
                logger.info("waiting for the validation of %d checkpoints", len(self._waiting))
            while self.poll(_POLL_S):
                pass
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the validation that runs; what was not validated keeps the metrics that it was reported with."""
        self._cancel_running()
        for checkpoint, _ in self._waiting:
            self._settle(checkpoint, {}, ReportedCheckpointStatus.COMMITTED)
        self._waiting.clear()

    def _begin(self) -> None:
        checkpoint, task = self._waiting[0]
        assert self._config is not None
        self._running = self._task.remote(self._config.fn, checkpoint.by_place(), task.fn_kwargs)
        self._deadline = None if task.timeout_s is None else time.monotonic() + task.timeout_s

    def _end(self, metrics: Mapping[str, Any], status: ReportedCheckpointStatus) -> None:
        self._running = None
        self._settle(self._waiting.popleft()[0], metrics, status)

    def _time_out(self) -> None:
        checkpoint, task = self._waiting[0]
        logger.warning("the validation of %s took longer than `timeout_s=%s`", checkpoint, task.timeout_s)
        self._cancel_running()
        self._end({}, ReportedCheckpointStatus.VALIDATION_TIMEOUT)

    def _cancel_running(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            import ray

            ray.cancel(running, force=True)


def _task_of(config: ValidationConfig) -> Any:
    import ray

    return ray.remote(_validated).options(**(config.ray_remote_kwargs or {}))


def _validated(function: ValidationFn, checkpoint: Checkpoint, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call the user's function, in a task of Ray.

    Raises:
        TypeError: It returned no dict.
    """
    metrics = function(checkpoint, **kwargs)
    if not isinstance(metrics, Mapping):
        raise TypeError(f"The validation function returned {metrics!r:.200}: need a dict of metrics.")
    return dict(metrics)


def _outcome(task: Any, checkpoint: Checkpoint) -> tuple[Mapping[str, Any], ReportedCheckpointStatus]:
    """Return what became of a task that is over."""
    import ray

    try:
        return ray.get(task), ReportedCheckpointStatus.VALIDATED
    except Exception as error:  # of the user's function, or of the worker that ran it
        logger.error("the validation of %s failed: %s", checkpoint, error)
        return {}, ReportedCheckpointStatus.VALIDATION_FAILED
