"""Metrics in an experiment of Comet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd._nested import flattened
from raysgd._optional import require
from raysgd._secrets import masked
from raysgd.writers.mlflow_run import numbers_in


class CometRun:
    """Writes to an experiment of Comet: the active one of this process, or a new one.

    Args:
        online: Whether to send it. Else it becomes an archive on the disk, which `comet upload` sends later.
        purpose: Who needs the package, for the error that it is missing.
        options: Arguments of the experiment, such as `project_name` and `workspace`.

    Raises:
        ModuleNotFoundError: comet_ml is not installed.
    """

    def __init__(self, online: bool = True, purpose: str = "an experiment of Comet", **options: Any) -> None:
        self._comet = require("comet_ml", extra="comet", purpose=purpose)
        self._online, self._options = online, options
        self._experiment: Any = None
        self._is_own = True

    def start(self, folder: Path, config: Mapping[str, Any], *, name: str, run_id: str | None = None) -> str:
        """Starts the experiment, or goes on with one.

        Args:
            folder: Where the archive of one that is not sent goes.
            config: The config of the run.
            name: What it is called.
            run_id: The experiment to go on with.

        Returns:
            Its key.
        """
        active = self._comet.get_running_experiment()
        self._is_own = active is None or not active.alive  # one that has ended is still named
        self._experiment = self._open(folder, run_id) if self._is_own else active
        if self._is_own and run_id is None:
            self._experiment.set_name(name)
        self._experiment.log_parameters(flattened(masked(config)))
        return str(self._experiment.get_key())

    def _open(self, folder: Path, run_id: str | None) -> Any:
        options = dict(self._options)
        if not self._online:
            folder.mkdir(parents=True, exist_ok=True)
            options.setdefault("offline_directory", str(folder))
        if run_id is not None:
            options["previous_experiment"] = run_id
        kind = f"{'' if run_id is None else 'Existing'}{'' if self._online else 'Offline'}Experiment"
        return getattr(self._comet, kind)(**options)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs what of the metrics is a number."""
        self._experiment.log_metrics(numbers_in(metrics), step=step)

    def close(self, *, has_failed: bool) -> None:
        """Ends the experiment, if it was started here."""
        if self._is_own and self._experiment is not None:
            self._experiment.log_other("status", "failed" if has_failed else "finished")
            self._experiment.end()
        self._experiment = None
