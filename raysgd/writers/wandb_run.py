"""Metrics in a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd._text.secrets import masked
from raysgd.writers.service_run import ServiceRun, numbers_in
from raysgd.writers.sink import LoggedRun


class WandbRun(ServiceRun):
    """Writes to a run of Weights & Biases.

    Args:
        name: What a new run is called.
        purpose: Who needs the package, for the error that it is missing.
        options: Arguments of `wandb.init`, such as `project` and `mode`.
    """

    def __init__(self, name: str | None = None, purpose: str = "a run of Weights & Biases", **options: Any) -> None:
        super().__init__("wandb", "wandb", purpose, name)
        self._options = options

    def open(self, run: LoggedRun, first_step: int | None = None) -> None:
        super().open(run, first_step)
        self.run_id = str(self._run.id)

    def _active(self) -> Any:
        return self._service.run

    def _start(self, run: LoggedRun) -> Any:
        going_on = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        options = {"name": self._name or run.name, "dir": str(run.folder), **going_on, **self._options}
        return self._service.init(config=dict(masked(run.config)), **options)

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Log what of a row is a number."""
        self._run.log(numbers_in(row), step=step)

    def _end(self, started: Any, has_failed: bool) -> None:
        started.finish(exit_code=int(has_failed))
