"""Callbacks that write what is reported: JSON, TensorBoard, MLflow."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raysgd._optional import require
from raysgd._paths import check_local
from raysgd.air.result import flattened
from raysgd.compat.names import former_names
from raysgd.train.callbacks._event_file import EventFile
from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.results_preprocessors import IndexedResultsPreprocessor
from raysgd.train.constants import (
    PID,
    RESULT_FILE_JSON,
    TIME_TOTAL_S,
    TIMESTAMP,
    TRAIN_CHECKPOINT_SUBDIR,
    TRAINING_ITERATION,
)

logger = logging.getLogger(__name__)


class LogdirManager:
    """Where a callback writes: the folder it was made with, or that of the run.

    Args:
        logdir: The folder; None for that of the run.
        create_logdir: Whether to make it.

    Raises:
        ValueError: `logdir` is a URI.
    """

    def __init__(self, logdir: str | Path | None = None, create_logdir: bool = True) -> None:
        check_local("logdir", logdir)
        self._logdir = Path(logdir) if logdir is not None else None
        self._default: Path | None = None
        self._create_logdir = create_logdir

    def setup_logdir(self, default_logdir: str | Path) -> Path:
        """Makes sure that the folder is there and returns it.

        Raises:
            FileExistsError: There is a file of that name.
            ValueError: It is not there and is not to be made.
        """
        self._default = Path(default_logdir)
        path = self.logdir_path
        if self._create_logdir:
            path.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            raise ValueError(f"`logdir={str(path)!r}` is not a folder: create it, or leave `create_logdir` at True.")
        return path

    @property
    def logdir_path(self) -> Path:
        """The folder.

        Raises:
            RuntimeError: It is that of the run, and there was none yet.
        """
        path = self._logdir or self._default
        if path is None:
            raise RuntimeError("The folder is not known before `start_training`: pass `logdir`, or read it later.")
        return path


class SafeFallbackEncoder(json.JSONEncoder):
    """Writes arrays as lists, scalars of numpy as numbers, and everything else that JSON does not know as text."""

    def default(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, np.generic):
            return value.item()
        return str(value)


class JsonLoggerCallback(TrainingCallback):
    """Keeps a JSON file: a list with one element for each report, which is a list of the workers' metrics.

    Args:
        logdir: The folder. Default: that of the run.
        filename: The file. Default: `results.json`.
        workers_to_log: A rank, several, or None for all.
    """

    _default_filename = RESULT_FILE_JSON

    def __init__(
        self,
        logdir: str | None = None,
        filename: str | None = None,
        workers_to_log: int | Iterable[int] | None = 0,
    ) -> None:
        self._logdir = LogdirManager(logdir)
        self._filename = filename or self._default_filename
        self._is_empty = True
        self.results_preprocessor = IndexedResultsPreprocessor(workers_to_log)

    @property
    def logdir(self) -> Path:
        """The folder."""
        return self._logdir.logdir_path

    @property
    def log_path(self) -> Path:
        """The file."""
        return self.logdir / self._filename

    def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
        self._logdir.setup_logdir(logdir)
        self.log_path.write_text("[]")
        self._is_empty = True

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Puts the results before the closing bracket, so that the file is whole after each of them."""
        text = json.dumps(results, cls=SafeFallbackEncoder)
        with open(self.log_path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(f"{'' if self._is_empty else ', '}{text}]".encode())
        self._is_empty = False


class TBXLoggerCallback(TrainingCallback):
    """Writes files for TensorBoard with tensorboardX.

    Args:
        logdir: The folder. Default: that of the run.
        worker_to_log: The rank whose reports are written.
    """

    VALID_SUMMARY_TYPES = EventFile.VALID_SUMMARY_TYPES
    IGNORE_KEYS = frozenset({PID, TIMESTAMP, TIME_TOTAL_S, TRAINING_ITERATION})

    def __init__(self, logdir: str | None = None, worker_to_log: int = 0) -> None:
        self._logdir = LogdirManager(logdir)
        self.results_preprocessor = IndexedResultsPreprocessor(one_rank(worker_to_log))
        require("tensorboardX", extra="tensorboard", purpose="`TBXLoggerCallback`")
        self._file: EventFile | None = None

    @property
    def logdir(self) -> Path:
        """The folder."""
        return self._logdir.logdir_path

    def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
        self._file = EventFile(self._logdir.setup_logdir(logdir), "ray/train")

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        [result] = results
        assert self._file is not None
        shown = {key: value for key, value in result.items() if key not in self.IGNORE_KEYS}
        self._file.write(shown, result[TRAINING_ITERATION])
        self._file.flush()

    def finish_training(self, error: bool = False, **info: Any) -> None:
        if self._file is not None:
            self._file.close()


def _parameters(config: Any) -> dict[str, Any]:
    """The config of a function by its names, where it has such."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    return dict(vars(config)) if hasattr(config, "__dict__") else {"config": config}


def one_rank(worker_to_log: Any) -> int:
    """The rank, also out of a list of one.

    Raises:
        ValueError: Several, or none.
        TypeError: No rank.
    """
    if isinstance(worker_to_log, int):
        return worker_to_log
    if not isinstance(worker_to_log, Iterable):
        raise TypeError(f"`worker_to_log={worker_to_log!r}`: need the rank of one worker.")
    ranks = list(worker_to_log)
    if len(ranks) != 1:
        raise ValueError(f"`worker_to_log={ranks!r}`: need the rank of one worker; the log cannot tell several apart.")
    return one_rank(ranks[0])


_default_stores: set[str] = set()  # that this module has chosen: MLflow cannot tell them from those of users


class MLflowLoggerCallback(TrainingCallback):
    """Keeps an MLflow run.

    Args:
        tracking_uri: Where runs are kept. Default: what `mlflow.set_tracking_uri` or the environment variable
            MLFLOW_TRACKING_URI says, else the folder `mlruns` in that of the run.
        registry_uri: Where models are kept. Default: with the runs, unless MLFLOW_REGISTRY_URI says something else.
        experiment_id: An experiment that is there. Default: the environment variable MLFLOW_EXPERIMENT_ID.
        experiment_name: Else the name of one, which is made if need be. Default: MLFLOW_EXPERIMENT_NAME.
        tags: Tags of the run.
        save_artifact: Whether to upload the checkpoints at the end.
        logdir: The folder. Default: that of the run.
        worker_to_log: The rank whose reports are written.

    Raises:
        ModuleNotFoundError: MLflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        registry_uri: str | None = None,
        experiment_id: str | None = None,
        experiment_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_artifact: bool = False,
        logdir: str | None = None,
        worker_to_log: int = 0,
    ) -> None:
        self._mlflow = require("mlflow", extra="mlflow", purpose="`MLflowLoggerCallback`")
        self._logdir = LogdirManager(logdir)
        self._tracking_uri, self._registry_uri = tracking_uri, registry_uri
        self._experiment_id, self._experiment_name = experiment_id, experiment_name
        self._tags = dict(tags or {})
        self._save_artifact = self.reads_checkpoints = save_artifact
        self.results_preprocessor = IndexedResultsPreprocessor(one_rank(worker_to_log))

    @property
    def logdir(self) -> Path:
        """The folder."""
        return self._logdir.logdir_path

    def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
        folder = self._logdir.setup_logdir(logdir)
        self._choose_store(folder / "mlruns")
        experiment = self._find_experiment()
        self._mlflow.start_run(experiment_id=experiment, tags=self._tags)
        self._mlflow.log_params(_parameters(config))

    def _choose_store(self, default: Path) -> None:
        mlflow = self._mlflow
        is_chosen = mlflow.is_tracking_uri_set() and mlflow.get_tracking_uri() not in _default_stores
        if self._tracking_uri or not is_chosen:
            mlflow.set_tracking_uri(self._tracking_uri or str(default))
        if not self._tracking_uri and not is_chosen:
            _default_stores.add(str(default))
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 wants a folder to be asked for twice
        if self._registry_uri:
            mlflow.set_registry_uri(self._registry_uri)

    def _find_experiment(self) -> str:
        identity = self._experiment_id or os.environ.get("MLFLOW_EXPERIMENT_ID")
        if identity is not None:
            try:
                return str(self._mlflow.get_experiment(experiment_id=identity).experiment_id)
            except self._mlflow.exceptions.MlflowException:
                logger.warning("there is no MLflow experiment %s; looking for one by name", identity)
        name = self._experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None:
            raise ValueError(
                "MLflow needs an experiment: pass the `experiment_id` of an existing one, or an `experiment_name`."
            )
        found = self._mlflow.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._mlflow.create_experiment(name))

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        [result] = results
        metrics = {}
        for name, value in flattened(result).items():
            try:
                metrics[name] = float(value)
            except (TypeError, ValueError):
                continue
        self._mlflow.log_metrics(metrics, step=result[TRAINING_ITERATION])

    def finish_training(self, error: bool = False, **info: Any) -> None:
        checkpoints = self.logdir / TRAIN_CHECKPOINT_SUBDIR
        if self._save_artifact and checkpoints.is_dir():
            self._mlflow.log_artifacts(str(checkpoints), artifact_path=TRAIN_CHECKPOINT_SUBDIR)
        self._mlflow.end_run(status="FAILED" if error else "FINISHED")


__getattr__, __dir__ = former_names(__name__)
