"""Metrics in a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd._optional import require
from raysgd._secrets import masked
from raysgd.writers.mlflow_run import numbers_in


class WandbRun:
    """Writes to a run of Weights & Biases: the active one of this process, or a new one.

    Args:
        purpose: Who needs the package, for the error that it is missing.
        options: Arguments of `wandb.init`, such as `project` and `mode`.

    Raises:
        ModuleNotFoundError: wandb is not installed.
    """

    def __init__(self, purpose: str = "a run of Weights & Biases", **options: Any) -> None:
        self._wandb = require("wandb", extra="wandb", purpose=purpose)
        self._options = options
        self._run: Any = None
        self._is_own = True

    def start(self, folder: Path, config: Mapping[str, Any], *, name: str, run_id: str | None = None) -> str:
        """Starts the run, or goes on with one.

        Args:
            folder: Where its files are.
            config: The config of the run.
            name: What it is called.
            run_id: The run to go on with.

        Returns:
            The id of the run.
        """
        self._is_own = self._wandb.run is None
        if self._is_own:
            going_on = {} if run_id is None else {"id": run_id, "resume": "allow"}
            options = {"name": name, "dir": str(folder), **going_on, **self._options}
            self._run = self._wandb.init(config=dict(masked(config)), **options)
        else:
            self._run = self._wandb.run
        return str(self._run.id)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs what of the metrics is a number."""
        self._run.log(numbers_in(metrics), step=step)

    def close(self, *, has_failed: bool) -> None:
        """Ends the run, if it was started here."""
        if self._is_own and self._run is not None:
            self._run.finish(exit_code=int(has_failed))
        self._run = None
