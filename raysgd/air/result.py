"""`Result`: the outcome of a run, and how to read it from the run's folder later."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from raysgd.core.numbers.metric_names import flattened, value_at
from raysgd.core.numbers.ranking import MAX, MIN, BestCheckpoints, SavedCheckpoint, as_score
from raysgd.core.text.secrets import masked
from raysgd.core.writers.files import report_in

if TYPE_CHECKING:
    import pandas

    from raysgd.storage import Folder

__all__ = ["Result", "flattened", "read_reports", "value_at"]

Kept = tuple[Checkpoint, dict[str, Any]]


@dataclass
class Result:
    """The result of a run.

    Attributes:
        metrics: The last report of rank 0, with the values that every report has; None if there was none.
        checkpoint: The last checkpoint that was reported, not the best one; None if there was none.
        error: The error that ended the run; None if it succeeded.
        folder: The folder of the trial; None if it has none.
        best_checkpoints: The checkpoints that were kept, including the newest, with the metrics reported with them.
            `fit()` orders them from worst to best. `from_path` orders them from oldest to newest, because the folder
            does not say which metric counts; pass it to `get_best_checkpoint`.
        reports: All reports of rank 0, unless they are read from the folder.
        return_value: Return value of the function on rank 0, if it is plain data: numbers, text, arrays of numbers, and
            lists and dicts of these. Other values stay in the worker. None if the result is read from a folder.
    """

    metrics: dict[str, Any] | Any
    checkpoint: Checkpoint | None
    error: Exception | None = None
    folder: Folder | None = None
    best_checkpoints: list[Kept] = field(default_factory=list)
    reports: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    return_value: Any = None
    _dataframe: Any = field(default=None, repr=False, compare=False)

    @property
    def path(self) -> str | Any:
        """The folder of the trial, without the scheme of a URI."""
        return self.folder.path if self.folder is not None else None

    @property
    def log_dir(self) -> Path | None:
        """The folder of the trial on this machine; None if it is in remote storage."""
        return self.folder.local_path if self.folder is not None and self.folder.is_local else None

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` of the trial's folder."""
        return self.folder.filesystem if self.folder is not None else None

    @property
    def config(self) -> dict[str, Any] | None:
        """The config of the run."""
        return (self.metrics or {}).get("config")

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """All reports of rank 0 as a `pandas.DataFrame`, one row each. Keys of nested dicts are joined by slashes.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        if self._dataframe is None:
            frames = require("pandas", extra="data", purpose="`Result.metrics_dataframe`")
            self._dataframe = frames.DataFrame([flattened(each) for each in self._all_reports()])
        return self._dataframe

    def _all_reports(self) -> Sequence[Mapping[str, Any]]:
        if self.reports is not None or self.folder is None:
            return self.reports or []
        return read_reports(self.folder)

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint:
        """Return the best of the checkpoints that were kept.

        Args:
            metric: The metric that was reported with them; slashes lead into nested dicts.
            mode: "max" or "min", for which value is best.

        Raises:
            ValueError: The mode is neither of these.
            RuntimeError: There are no checkpoints, or none was reported with this metric.
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
        """Read the result of a run from the folder of its trial. Reading an error may run code, since it is a pickle.

        Args:
            path: That folder, or its URI: the `Result.path` of the run, inside the folder with the run's name.
            storage_filesystem: A `pyarrow.fs.FileSystem` that contains `path`.

        Raises:
            RuntimeError: There is no such folder, or it is not that of a trial.
        """
        from raysgd.storage import open_folder

        folder = open_folder(path, storage_filesystem)
        if not folder.exists() or not folder.has(RESULT_FILE):
            raise RuntimeError(
                f"`path={masked(str(path))!r}`: there is no `{RESULT_FILE}`. Pass the folder of a trial, which lies in "
                "the folder with the run's name."
            )
        reports = read_reports(folder)
        kept = _read_checkpoints(folder, reports)
        return cls(
            metrics=reports[-1] if reports else None,
            checkpoint=kept[-1][0] if kept else None,
            error=_read_error(folder),
            folder=folder,
            best_checkpoints=kept,
        )


def read_reports(folder: Folder) -> list[dict[str, Any]]:
    """Return the reports in the `result.json` of a trial. An incomplete line, as after a kill, is left out."""
    if not folder.has(RESULT_FILE):
        return []
    lines = folder.read(RESULT_FILE).decode(errors="replace").split("\n")
    return [report for line in lines if (report := report_in(line)) is not None]


def by_checkpoint(reports: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports that have a checkpoint, by the name of its folder."""
    named = ((report.get(CHECKPOINT_DIR_NAME), report) for report in reports)
    return {name: dict(report) for name, report in named if isinstance(name, str)}


def _read_checkpoints(folder: Folder, reports: Iterable[Mapping[str, Any]]) -> list[Kept]:
    """Return the checkpoints of a trial, oldest first, each with its report."""
    by_name = by_checkpoint(reports)
    names = checkpoints_in(folder.committed())
    return [(Checkpoint(folder / name), by_name.get(name, {})) for name in names]


def _read_error(folder: Folder) -> Exception | None:
    """Return the error of a trial, or a `RuntimeError` with its text if its class can no longer be loaded."""
    if folder.has(ERROR_PICKLE_FILE):
        try:
            error = pickle.loads(folder.read(ERROR_PICKLE_FILE))
        except Exception:  # its class may have changed, and raise anything
            error = None
        if isinstance(error, Exception):
            return error
    return RuntimeError(folder.read(ERROR_FILE).decode()) if folder.has(ERROR_FILE) else None
