"""Loggers: write the metrics of every epoch, or of every report of a function, to files and services."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from raysgd._checks import refuse_text
from raysgd._optional import require_installed
from raysgd._paths import check_path
from raysgd.callbacks.adapters import TRAINING_ITERATION
from raysgd.callbacks.callback import Callback, Run, refuse_one_place
from raysgd.writers.comet_run import CometRun
from raysgd.writers.csv_table import CsvTable, keep_rows
from raysgd.writers.event_file import LateEventFile
from raysgd.writers.failing import never_ends_a_run
from raysgd.writers.json_files import JsonLines, keep_lines
from raysgd.writers.mlflow_run import MLflowRun
from raysgd.writers.wandb_run import WandbRun

_MODES_OF_WANDB = (None, "online", "offline", "disabled", "shared")


class MetricsLogger(Callback):
    """What all loggers share: they open a target with the first report, write to it, and close it at the end."""

    def __init__(self) -> None:
        self._is_open = False
        self._first_epoch = 0

    @never_ends_a_run
    def on_run_begin(self, run: Run) -> None:
        """Notes where the run begins, and opens the target."""
        self._first_epoch = run.epoch
        self._open_once(run)

    @never_ends_a_run
    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Writes one report."""
        self._open_once(run)
        self._write(result, run.epoch)

    @never_ends_a_run
    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Closes the target."""
        if self._is_open:
            self._is_open = False
            self._close(has_failed=error is not None)

    def _open_once(self, run: Run) -> None:
        if self._is_open:
            return
        try:
            self._open(run)
        except Exception:
            with suppress(Exception):  # of what may be open by half
                self._close(has_failed=True)
            raise
        self._is_open = True

    @abstractmethod
    def _open(self, run: Run) -> None:
        """Opens the target."""

    @abstractmethod
    def _write(self, result: Mapping[str, Any], step: int) -> None:
        """Writes one report."""

    def _close(self, *, has_failed: bool) -> None:
        """Closes the target, if it stays open between two reports."""


class _FileLogger(MetricsLogger):
    """Writes one file, of which a run that resumes keeps the rows up to its checkpoint; any other run replaces it."""

    _default_name: str

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        if path is not None:
            check_path("path", path)
        self._given = Path(path).expanduser().absolute() if path is not None else None
        self.path: Path | None = self._given
        self._file: Any = None

    def _check_run(self, run: Run) -> None:
        refuse_one_place(self, "path", run)

    def _open(self, run: Run) -> None:
        self.path = self._given if self._given is not None else run.folder / self._default_name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open_file(self.path, partial(_is_of_before, self._first_epoch))

    @abstractmethod
    def _open_file(self, path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> Any:
        """Opens the file, with the rows in it that are kept."""

    def _write(self, result: Mapping[str, Any], step: int) -> None:
        self._file.write({"epoch": step, **result})


class CSVLogger(_FileLogger):
    """Writes a table with a row for each epoch. A metric that comes later adds a column.

    Args:
        path: The file. Default: `metrics.csv` in the folder of the run.

    Attributes:
        path: The file.

    Raises:
        TypeError, ValueError: `path` is no path, or a URI.
    """

    _default_name = "metrics.csv"

    def _open_file(self, path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> CsvTable:
        keep_rows(path, is_kept)
        return CsvTable(path)


class JSONLogger(_FileLogger):
    """Writes a file with a JSON object for each epoch, one a line.

    Args:
        path: The file. Default: `metrics.jsonl` in the folder of the run.

    Attributes:
        path: The file.

    Raises:
        TypeError, ValueError: `path` is no path, or a URI.
    """

    _default_name = "metrics.jsonl"

    def _open_file(self, path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> JsonLines:
        keep_lines(path, is_kept)
        return JsonLines(path)


class TensorBoardLogger(MetricsLogger):
    """Writes files for TensorBoard, with tensorboardX. The step is the epoch.

    Args:
        folder: Where they go. Default: `tensorboard` in the folder of the run.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
        TypeError, ValueError: `folder` is no path, or a URI.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        if folder is not None:
            check_path("folder", folder)
        require_installed("tensorboardX", extra="tensorboard", purpose="`TensorBoardLogger`")
        self._folder = Path(folder).expanduser() if folder is not None else None
        self._file: LateEventFile | None = None

    def _open(self, run: Run) -> None:
        folder = self._folder if self._folder is not None else run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = LateEventFile(folder, "")

    def _write(self, result: Mapping[str, Any], step: int) -> None:
        assert self._file is not None
        self._file.write({name: value for name, value in result.items() if name != "epoch"}, step)

    def _close(self, *, has_failed: bool) -> None:
        assert self._file is not None
        self._file.close()


class _ServiceLogger(MetricsLogger):
    """Writes to a run of a service. A run that resumes goes on with the same one."""

    def __init__(self, service: Any, name: str | None) -> None:
        super().__init__()
        self._service, self._name = service, name
        self.run_id: str | None = None

    def on_run_begin(self, run: Run) -> None:
        """Opens a run of the service; one that `load_state_dict` named is for a run that resumes."""
        self.run_id = self.run_id if run.epoch else None
        super().on_run_begin(run)

    def _open(self, run: Run) -> None:
        self.run_id = self._service.start(run.folder, run.config, name=self._name or run.name, run_id=self.run_id)

    def _write(self, result: Mapping[str, Any], step: int) -> None:
        self._service.write(result, step)

    def _close(self, *, has_failed: bool) -> None:
        self._service.close(has_failed=has_failed)

    def state_dict(self) -> dict[str, Any]:
        """The id of the run."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with that run."""
        self.run_id = state["run_id"]


class MLflowLogger(_ServiceLogger):
    """Keeps a run of MLflow: the config as its parameters, the metrics with the epoch as their step.

    If a run is active already, it writes to that one and leaves it open.

    Args:
        experiment_name: The experiment, which is made if need be. Default: the environment variable
            MLFLOW_EXPERIMENT_NAME, else the name of the run.
        run_name: Default: the name of the run.
        tracking_uri: Where runs are kept. Default: what MLflow is set to, else `mlruns` in the folder of the run.
        tags: Tags of the run.

    Attributes:
        run_id: The id of the run.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
    """

    def __init__(
        self,
        experiment_name: str | None = None,
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        service = MLflowRun(tracking_uri, None, None, experiment_name, tags, joins=True, purpose="`MLflowLogger`")
        super().__init__(service, run_name)

    def _open(self, run: Run) -> None:
        self._service.default_experiment = run.name
        super()._open(run)


class WandbLogger(_ServiceLogger):
    """Keeps a run of Weights & Biases: the config, and the metrics with the epoch as their step.

    If a run is active already, it writes to that one and leaves it open.

    Args:
        project: The project. Default: the environment variable WANDB_PROJECT, or what the service chooses.
        name: Default: the name of the run.
        mode: "online", "offline" (writes files that `wandb sync` uploads later; needs no network) or "disabled".
            Default: the environment variable WANDB_MODE, else "online".
        options: More arguments of `wandb.init`, such as `entity`, `group`, `tags` and `dir`.

    Attributes:
        run_id: The id of the run.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        ValueError: `mode` is unknown.
    """

    def __init__(
        self, project: str | None = None, *, name: str | None = None, mode: str | None = None, **options: Any
    ) -> None:
        if mode not in _MODES_OF_WANDB:
            raise ValueError(f'`mode={mode!r}`: allowed are "online", "offline", "disabled" and "shared", or None.')
        given = {"project": project, "mode": mode}
        options |= {key: value for key, value in given.items() if value is not None}
        super().__init__(WandbRun(purpose="`WandbLogger`", **options), name)


class CometLogger(_ServiceLogger):
    """Keeps an experiment of Comet: the config as its parameters, the metrics with the epoch as their step.

    If an experiment is active already, it writes to that one and leaves it open.

    Args:
        project: The project. Default: the environment variable COMET_PROJECT_NAME, or what the service chooses.
        name: Default: the name of the run.
        online: False writes an archive to the folder of the run when the run ends; `comet upload` sends it later. It
            needs no network and no key.
        options: More arguments of `comet_ml.Experiment`, such as `workspace` and `offline_directory`.

    Attributes:
        run_id: The key of the experiment.

    Raises:
        ModuleNotFoundError: comet_ml is not installed.
    """

    def __init__(
        self, project: str | None = None, *, name: str | None = None, online: bool = True, **options: Any
    ) -> None:
        refuse_text(online=online)
        options |= {} if project is None else {"project_name": project}
        super().__init__(CometRun(online, purpose="`CometLogger`", **options), name)


def _is_of_before(epoch: int, row: Mapping[str, Any]) -> bool:
    """Whether a row is of one of the first epochs, or of the first reports of a function, which may count otherwise."""
    try:
        return int(row.get(TRAINING_ITERATION) or row["epoch"]) <= epoch
    except (KeyError, TypeError, ValueError):
        return False
