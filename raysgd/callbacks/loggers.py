"""Loggers: callbacks that write metrics to files and to tracking services.

They write the metrics of each epoch, or of each report of a training function.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from raysgd.callbacks.callback import Callback, Run, WritesFiles, given_path
from raysgd.core.arguments import refuse_text
from raysgd.core.history import readable
from raysgd.core.writers.services import CometRun, MLflowRun, ServiceRun, WandbRun
from raysgd.core.writers.sinks import CsvTable, EventFile, JsonLines, SafeSink, Sink

_MODES_OF_WANDB = (None, "online", "offline", "disabled", "shared")


class MetricsLogger(Callback):
    """Base class of all loggers. Each result of a run is written to a sink, which is a file or a tracking service.

    The sink is opened when the run begins, and closed when the run ends.

    Args:
        sink: The file or service that receives the results.
        hidden: Names of metrics that are not written.
    """

    def __init__(self, sink: Sink, hidden: Collection[str] = ()) -> None:
        self._sink = SafeSink(sink, type(self).__name__, hidden)

    def on_run_begin(self, run: Run) -> None:
        """Open the file or service. A resumed run adds the epochs after the checkpoint from which it resumes."""
        with self._sink.warns():
            self._sink.open(run, first_step=run.epoch if run._last_told is None else run._last_told)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Write the metrics of one epoch or report."""
        self._sink.write(result, run.epoch)

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of steps under names with the prefix `steps/`.

        This separates them from other metrics, whose x-axis is the epoch.
        """
        self._sink.write({f"steps/{name}": value for name, value in metrics.items()}, step)

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Write the metrics of a validation inside an epoch in the same way as the metrics of steps."""
        self.on_step_metrics(run, step, readable.chosen(metrics, None))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Close the file or service."""
        self._sink.close(has_failed=error is not None)


class _FileLogger(WritesFiles, MetricsLogger):
    """Base class of loggers that write two files: one for the metrics of epochs, and one for the metrics of steps.

    If a run continues earlier training, rows of that training are kept: the rows up to the loaded checkpoint, or up to
    the end of the trainer's previous `fit`. All other rows are removed when the run begins.
    """

    _format: ClassVar[type[CsvTable | JsonLines]]
    _default_name: ClassVar[str]

    def __init__(self, path: str | Path | None = None) -> None:
        self._given = given_path("path", path)
        self._file = self._format(self._given or self._default_name)
        super().__init__(self._file)

    @property
    def path(self) -> Path | None:
        """Path of the file with the metrics of epochs. If you passed no path, None before the run begins."""
        return self._file.path if self._file.path.is_absolute() else None

    def on_run_begin(self, run: Run) -> None:
        super().on_run_begin(run)
        path = self._file.path.with_stem(f"{self._file.path.stem}.steps")
        file = self._format(path)
        file.last_step = run._global_step
        self._steps = SafeSink(file, type(self).__name__)
        with self._steps.warns():  # open an existing file now, to remove rows that an earlier run has written there
            # Keep the steps of an epoch whose own row is still missing, because its validation was not complete.
            (self._steps.open if path.exists() else self._steps.begin)(run, run.epoch)

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of steps to the file for steps."""
        self._steps.write({"epoch": run.epoch, "step": step, **metrics}, step)

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        """Write the metrics of a validation inside an epoch to the file for steps."""
        self._steps.write({"epoch": run.epoch + 1, "step": step, **readable.chosen(metrics, None)}, step)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Write an epoch's number and metrics to the file that has one row per epoch."""
        super().on_result(run, {"epoch": run.epoch, **result})


class CSVLogger(_FileLogger):
    """Writes a CSV file with one row per epoch, and a second file for steps. A new metric adds a column.

    Args:
        path: Path of the file. Default: `metrics.csv` in the run's folder. The file for steps is then
            `metrics.steps.csv`.

    Attributes:
        path: Path of the file.

    Raises:
        TypeError, ValueError: `path` is not a path, or is a URI.
    """

    _format, _default_name = CsvTable, "metrics.csv"


class JSONLogger(_FileLogger):
    """Writes a JSON Lines file with one object per epoch, and a second file for steps.

    Args:
        path: Path of the file. Default: `metrics.jsonl` in the run's folder. The file for steps is then
            `metrics.steps.jsonl`.

    Attributes:
        path: Path of the file.

    Raises:
        TypeError, ValueError: `path` is not a path, or is a URI.
    """

    _format, _default_name = JsonLines, "metrics.jsonl"


class TensorBoardLogger(WritesFiles, MetricsLogger):
    """Writes TensorBoard files with tensorboardX. The x-axis is the epoch, or the step for metrics under `steps/`.

    Args:
        folder: Folder for the files. Default: `tensorboard` in the run's folder.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
        TypeError, ValueError: `folder` is not a path, or is a URI.
    """

    _argument = "folder"

    def __init__(self, folder: str | Path | None = None) -> None:
        self._given = given_path("folder", folder)
        super().__init__(EventFile(self._given or "tensorboard", "", purpose="`TensorBoardLogger`"), hidden=("epoch",))


class _ServiceLogger(MetricsLogger):
    """Base class of loggers for tracking services.

    A training run continues the earlier run of the service if it resumes from a checkpoint, or if the trainer's
    previous `fit` used the same logger. A training run that begins with its first step gets a new run of the service.
    """

    def __init__(self, service: ServiceRun) -> None:
        self._service = service
        super().__init__(service)

    @property
    def run_id(self) -> str | None:
        """ID of the run in the tracking service, or None before the service has created the run."""
        return self._service.run_id

    def on_run_begin(self, run: Run) -> None:
        """Start a run of the service. A resumed training run continues its run, also inside the first epoch."""
        with self._sink.warns():
            self._sink.open(run, first_step=run.epoch or run.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the ID of the run in the tracking service, so that a resumed training run can continue it."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the saved ID of a run in the tracking service. This logger then continues that run."""
        self._service.run_id = state["run_id"]


class MLflowLogger(_ServiceLogger):
    """Logs to an MLflow run: the config as parameters, and the metrics with the epoch as the step.

    If an MLflow run is already active, the logger writes to it and does not close it. In this case, the arguments have
    no effect.

    Args:
        experiment_name: Name of the experiment, which is created if necessary. Default: the environment variable
            MLFLOW_EXPERIMENT_NAME, otherwise the name of the training run. If the environment variable
            MLFLOW_EXPERIMENT_ID names an existing experiment, that experiment is used instead.
        run_name: Name of the MLflow run. Default: the name of the training run.
        tracking_uri: Where MLflow stores runs. Default: MLflow's own setting, otherwise `mlruns` in the training run's
            folder.
        tags: Tags of the MLflow run.

    Attributes:
        run_id: ID of the MLflow run.

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
        options: dict[str, Any] = {"experiment_name": experiment_name, "tags": tags, "name": run_name}
        super().__init__(MLflowRun(tracking_uri, **options, joins=True, purpose="`MLflowLogger`"))


class WandbLogger(_ServiceLogger):
    """Logs to a Weights & Biases run: the config, and the metrics with the epoch as the step.

    If a wandb run is already active, the logger writes to it and does not close it. In this case, the arguments have no
    effect. Step metrics, and the metrics of validations inside epochs, are not logged.

    Args:
        project: Name of the project. Default: the environment variable WANDB_PROJECT, or the service's default.
        name: Name of the wandb run. Default: the name of the training run.
        mode: "online", "shared", "disabled", or "offline", which needs no network and writes files that `wandb sync`
            uploads later. Default: the environment variable WANDB_MODE, otherwise "online".
        options: Further arguments of `wandb.init`, such as `entity`, `group`, `tags` and `dir`.

    Attributes:
        run_id: ID of the wandb run.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        ValueError: `mode` is unknown.
    """

    def __init__(
        self, project: str | None = None, *, name: str | None = None, mode: str | None = None, **options: Any
    ) -> None:
        if mode not in _MODES_OF_WANDB:
            raise ValueError(f'`mode={mode!r}`: allowed are "online", "offline", "disabled" and "shared", or None.')
        named = {"project": project, "mode": mode}
        options |= {key: value for key, value in named.items() if value is not None}
        super().__init__(WandbRun(name, "`WandbLogger`", **options))

    # Do not log the metrics of steps: a wandb run has a single step counter, which this logger uses for epochs.
    on_step_metrics = Callback.on_step_metrics
    on_validation = Callback.on_validation


class CometLogger(_ServiceLogger):
    """Logs to a Comet experiment: the config as parameters, and the metrics with the epoch as the step.

    If an experiment is already active, the logger writes to it and does not close it. In this case, the arguments have
    no effect.

    Args:
        project: Name of the project. Default: the environment variable COMET_PROJECT_NAME, or the service's default.
        name: Name of the experiment. Default: the name of the training run.
        online: If False, the logger needs no network and no API key. When the run ends, it writes an archive to the
            run's folder, and `comet upload` uploads the archive later.
        options: Further arguments of `comet_ml.Experiment`, such as `workspace` and `offline_directory`.

    Attributes:
        run_id: Key of the experiment.

    Raises:
        ModuleNotFoundError: comet_ml is not installed.
    """

    def __init__(
        self, project: str | None = None, *, name: str | None = None, online: bool = True, **options: Any
    ) -> None:
        refuse_text(online=online)
        options |= {} if project is None else {"project_name": project}
        super().__init__(CometRun(online, name, "`CometLogger`", **options))
