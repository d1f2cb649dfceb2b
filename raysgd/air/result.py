"""`Result`: the outcome of a run. It can also be read from the run's folder later."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.constants import (
    ERROR_FILE,
    ERROR_PICKLE_FILE,
    RESULT_FILE,
)
from raysgd.air.reports import CHECKPOINT_DIR_NAME
from raysgd.air.trial import checkpoints_in
from raysgd.core.imports import require
from raysgd.core.numbers.ranking import MAX, MIN, BestCheckpoints, SavedCheckpoint, as_score
from raysgd.core.numbers.results import flattened, value_at
from raysgd.core.text.secrets import masked
from raysgd.core.writers.sinks import report_in
from raysgd.storage import Folder, open_folder

if TYPE_CHECKING:
    import pandas

__all__ = ["Result", "flattened", "read_reports", "value_at"]

Kept = tuple[Checkpoint, dict[str, Any]]


@dataclass
class Result:
    """The outcome of a run.

    Attributes:
        metrics: The last report of rank 0, including the values that raysgd adds to every report, such as
            `training_iteration`. None if rank 0 never reported.
        checkpoint: The checkpoint that was reported last, not necessarily the best. None if there is no checkpoint.
        error: The error that ended the run. None if the run succeeded.
        folder: The trial's folder. None if the run has no folder.
        best_checkpoints: The retained checkpoints, including the newest, each with the metrics that were reported with
            it. `fit()` orders them from worst to best. `from_path` orders them from oldest to newest, because the
            folder does not record which metric ranks them. To rank them, call `get_best_checkpoint`.
        return_value: Return value of the training function on rank 0, if it is plain data: numbers, strings, numeric
            arrays, and lists and dicts of these. None for other values, and if the result is read from a folder.
    """

    metrics: dict[str, Any] | Any
    checkpoint: Checkpoint | None
    error: Exception | None = None
    folder: Folder | None = None
    best_checkpoints: list[Kept] = field(default_factory=list)
    return_value: Any = None

    @property
    def path(self) -> str | Any:
        """The path of the trial's folder, without a URI scheme. None if the run has no folder."""
        return self.folder.path if self.folder is not None else None

    @property
    def log_dir(self) -> Path | None:
        """The local path of the trial's folder. None if the folder is in remote storage, or the run has no folder."""
        return self.folder.local_path if self.folder is not None and self.folder.is_local else None

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` of the trial's folder. None if the run has no folder."""
        return self.folder.filesystem if self.folder is not None else None

    @property
    def config(self) -> dict[str, Any] | None:
        """The trial's config. None if rank 0 never reported.

        In a run of `fit()`, this is `{"train_loop_config": config}` with the config of the training function, or an
        empty dict if the function has no config. Large values are shortened, and keys and passwords are masked.
        """
        return (self.metrics or {}).get("config")

    @cached_property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """All reports of rank 0 as a `pandas.DataFrame`, one row per report.

        Keys of nested dicts are joined with slashes.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        frames = require("pandas", extra="data", purpose="`Result.metrics_dataframe`")
        reports = [] if self.folder is None else read_reports(self.folder)
        return frames.DataFrame([flattened(each) for each in reports])

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint:
        """Return the best of the retained checkpoints.

        Args:
            metric: Name of a metric that was reported with the checkpoints. "a/b" names the entry "b" of the dict "a".
            mode: "max" if the highest value is best, "min" if the lowest is.

        Raises:
            ValueError: `mode` is neither "max" nor "min".
            RuntimeError: There are no checkpoints, or no checkpoint was reported with this metric.
        """
        if mode not in (MAX, MIN):
            raise ValueError(f'`mode={mode!r}`: allowed are "{MAX}" and "{MIN}".')
        if not self.best_checkpoints:
            raise RuntimeError("The run has retained no checkpoint, so there is no best one.")
        having = [kept for kept in self.best_checkpoints if value_at(kept[1], metric) is not None]
        if not having:
            known = sorted({key for _, metrics in self.best_checkpoints for key in flattened(metrics)})
            raise RuntimeError(f"`metric={metric!r}`: no checkpoint was reported with this metric. Available: {known}.")
        judged = [
            SavedCheckpoint(number, as_score(value_at(metrics, metric)), checkpoint)
            for number, (checkpoint, metrics) in enumerate(having)
        ]
        [best] = BestCheckpoints(1, mode).best(judged)
        return best.content

    @classmethod
    def from_path(cls, path: str | Path, storage_filesystem: Any = None) -> Result:
        """Read the result of a run from its trial's folder. Errors are unpickled, which may run code.

        Args:
            path: Path or URI of the trial's folder, as in `Result.path`. The trial's folder is inside the folder
                that has the run's name.
            storage_filesystem: A `pyarrow.fs.FileSystem` that contains `path`.

        Raises:
            RuntimeError: The folder does not exist or is not a trial's folder.
        """
        folder = open_folder(path, storage_filesystem)
        if not folder.exists() or not folder.has(RESULT_FILE):
            raise RuntimeError(
                f"`path={masked(str(path))!r}`: there is no `{RESULT_FILE}`. Pass the folder of a trial, which lies in "
                "the folder with the run's name."
            )
        reports = read_reports(folder)
        kept = read_checkpoints(folder, reports)
        return cls(
            metrics=reports[-1] if reports else None,
            checkpoint=kept[-1][0] if kept else None,
            error=_read_error(folder),
            folder=folder,
            best_checkpoints=kept,
        )


def read_reports(folder: Folder) -> list[dict[str, Any]]:
    """Return the reports in a trial's `result.json`. Skip an incomplete line, which a killed run may have left."""
    if not folder.has(RESULT_FILE):
        return []
    lines = folder.read(RESULT_FILE).decode(errors="replace").split("\n")
    return [report for line in lines if (report := report_in(line)) is not None]


def read_checkpoints(folder: Folder, reports: Iterable[Mapping[str, Any]]) -> list[Kept]:
    """Return a trial's checkpoints with their reports, oldest first."""
    named = ((report.get(CHECKPOINT_DIR_NAME), report) for report in reports)
    by_name = {name: dict(report) for name, report in named if isinstance(name, str)}
    return [(Checkpoint(folder / name), by_name.get(name, {})) for name in checkpoints_in(folder.committed())]


def _read_error(folder: Folder) -> Exception | None:
    """Return the error that ended a trial, or None if no error was saved.

    If only the error's text was saved, or the error cannot be unpickled, return a `RuntimeError` with the tracebacks
    of all failed attempts.
    """
    if folder.has(ERROR_PICKLE_FILE):
        try:
            error = pickle.loads(folder.read(ERROR_PICKLE_FILE))
        except Exception:  # unpickling may raise anything, for example if the error's class has changed
            error = None
        if isinstance(error, Exception):
            return error
    return RuntimeError(folder.read(ERROR_FILE).decode()) if folder.has(ERROR_FILE) else None
