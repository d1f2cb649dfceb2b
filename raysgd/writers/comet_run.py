"""Metrics in an experiment of Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd._numbers.nested import flattened
from raysgd._text.secrets import masked
from raysgd.writers.service_run import ServiceRun, numbers_in
from raysgd.writers.sink import LoggedRun


class CometRun(ServiceRun):
    """Writes to an experiment of Comet.

    Args:
        online: Whether to send it. Else it becomes an archive in the folder of the run, which `comet upload` sends.
        name: What a new experiment is called.
        purpose: Who needs the package, for the error that it is missing.
        options: Arguments of the experiment, such as `project_name` and `workspace`.
    """

    def __init__(
        self, online: bool = True, name: str | None = None, purpose: str = "an experiment of Comet", **options: Any
    ) -> None:
        super().__init__("comet_ml", "comet", purpose, name)
        self._online, self._options = online, options

    def open(self, run: LoggedRun, first_step: int | None = None) -> None:
        super().open(run, first_step)
        self._run.log_parameters(flattened(masked(run.config)))
        self.run_id = str(self._run.get_key())

    def _active(self) -> Any:
        active = self._service.get_running_experiment()
        return active if active is not None and active.alive else None  # one that has ended is still named

    def _start(self, run: LoggedRun) -> Any:
        options = dict(self._options)
        if not self._online:
            run.folder.mkdir(parents=True, exist_ok=True)
            options.setdefault("offline_directory", str(run.folder))
        if self.run_id is not None:
            options["previous_experiment"] = self.run_id
        kind = f"{'' if self.run_id is None else 'Existing'}{'' if self._online else 'Offline'}Experiment"
        started = getattr(self._service, kind)(**options)
        if self.run_id is None:
            started.set_name(self._name or run.name)
        return started

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Log what of a row is a number."""
        self._run.log_metrics(numbers_in(row), step=step)

    def _end(self, started: Any, has_failed: bool) -> None:
        started.log_other("status", "failed" if has_failed else "finished")
        started.end()
