"""Callbacks that write reports to JSON files, to TensorBoard, and to MLflow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from raysgd.compat.names import former_names
from raysgd.core.files import check_local
from raysgd.core.text.secrets import masked
from raysgd.core.writers.sinks import EventFile, JsonList, RunInFolder, SafeSink, Sink
from raysgd.core.writers.sinks import SafeFallbackEncoder as SafeFallbackEncoder
from raysgd.train import constants
from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.results_preprocessors import IndexedResultsPreprocessor


class LogdirManager:
    """Determines the folder of a callback: the folder that the user passed, or else the run's folder.

    Args:
        logdir: Folder for the callback's files; None for the run's folder.
        create_logdir: True to create the folder.

    Raises:
        ValueError: `logdir` is a URI.
    """

    def __init__(self, logdir: str | Path | None = None, create_logdir: bool = True) -> None:
        check_local("logdir", logdir)
        self._logdir = Path(logdir) if logdir is not None else None
        self._default: Path | None = None
        self._create_logdir = create_logdir

    def setup_logdir(self, default_logdir: str | Path) -> Path:
        """Return the callback's folder. Create the folder if it does not exist and `create_logdir` is True.

        Raises:
            FileExistsError: A file has the folder's name.
            ValueError: The folder does not exist and `create_logdir` is False.
        """
        self._default = Path(default_logdir)
        path = self.logdir_path
        if self._create_logdir:
            path.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            raise ValueError(
                f"`logdir={masked(str(path))!r}` is not a folder: create it, or leave `create_logdir` at True."
            )
        return path

    @property
    def logdir_path(self) -> Path:
        """Path of the callback's folder.

        Raises:
            RuntimeError: The callback uses the run's folder, and no run has started yet.
        """
        path = self._logdir or self._default
        if path is None:
            raise RuntimeError("The folder is not known before `start_training`: pass `logdir`, or read it later.")
        return path


class _SinkCallback(TrainingCallback):
    """Writes the reports of one or several workers to a sink, such as a file or a tracking service.

    Args:
        sink: Destination of the reports.
        logdir: Folder for the sink's files. Default: the run's folder.
        workers: A rank, several ranks, or None for all.
        hidden: Metrics to omit.
    """

    def __init__(
        self, sink: Sink, logdir: str | None, workers: int | Iterable[int] | None, hidden: Collection[str] = ()
    ) -> None:
        self._sink = SafeSink(sink, type(self).__name__, hidden)
        self._logdir = LogdirManager(logdir)
        self.results_preprocessor = IndexedResultsPreprocessor(workers)

    @property
    def logdir(self) -> Path:
        """The folder to which this callback writes."""
        return self._logdir.logdir_path

    def start_training(self, logdir: str, config: Any = None, **info: Any) -> None:
        self._sink.open(RunInFolder(self._logdir.setup_logdir(logdir), config), first_step=0)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        [result] = results
        self._sink.write(result, result[constants.TRAINING_ITERATION])

    def finish_training(self, error: bool = False, **info: Any) -> None:
        self._sink.close(has_failed=error)


class JsonLoggerCallback(_SinkCallback):
    """Writes all reports of a run to one JSON file.

    The file contains a list with one element per report. Each element is a list of the selected workers' metrics.

    Args:
        logdir: Folder of the file. Default: the run's folder.
        filename: Name of the file. Default: `results.json`.
        workers_to_log: A rank, several ranks, or None for all.
    """

    _default_filename = constants.RESULT_FILE_JSON

    def __init__(
        self,
        logdir: str | None = None,
        filename: str | None = None,
        workers_to_log: int | Iterable[int] | None = 0,
    ) -> None:
        self._filename = filename or self._default_filename
        super().__init__(JsonList(self._filename), logdir, workers_to_log)

    @property
    def log_path(self) -> Path:
        """Path of the JSON file that this callback writes."""
        return self.logdir / self._filename

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        self._sink.write(results, step=0)  # a `JsonList` ignores `step`


class TBXLoggerCallback(_SinkCallback):
    """Writes the reports of one worker to files for TensorBoard, with tensorboardX.

    Args:
        logdir: Folder of the files. Default: the run's folder.
        worker_to_log: The rank whose reports are written.
    """

    VALID_SUMMARY_TYPES = EventFile.VALID_SUMMARY_TYPES
    IGNORE_KEYS = frozenset({constants.PID, constants.TIMESTAMP, constants.TIME_TOTAL_S, constants.TRAINING_ITERATION})

    def __init__(self, logdir: str | None = None, worker_to_log: int = 0) -> None:
        sink = EventFile("", "ray/train", flushes=True, purpose="`TBXLoggerCallback`")
        super().__init__(sink, logdir, one_rank(worker_to_log), self.IGNORE_KEYS)


def one_rank(worker_to_log: Any) -> int:
    """Return the rank that a user passed as `worker_to_log`, alone or in a list.

    Raises:
        ValueError: The list does not have exactly one element.
        TypeError: `worker_to_log` is neither a rank nor a list.
    """
    if isinstance(worker_to_log, int):
        return worker_to_log
    if isinstance(worker_to_log, str) or not isinstance(worker_to_log, Iterable):
        raise TypeError(f"`worker_to_log={worker_to_log!r}`: need the rank of one worker.")
    ranks = list(worker_to_log)
    if len(ranks) != 1:
        raise ValueError(f"`worker_to_log={ranks!r}`: need the rank of one worker; the log cannot tell several apart.")
    return one_rank(ranks[0])


class MLflowLoggerCallback(_SinkCallback):
    """Logs the reports of one worker to an MLflow run.

    Args:
        tracking_uri: Store of the runs. Default: as set by `mlflow.set_tracking_uri` or the environment variable
            MLFLOW_TRACKING_URI, else the folder `mlruns` in the run's folder.
        registry_uri: Store of the models. Default: MLFLOW_REGISTRY_URI, else the store of the runs.
        experiment_id: ID of an existing experiment. Default: the environment variable MLFLOW_EXPERIMENT_ID.
        experiment_name: Name of the experiment if there is no ID, or no experiment with this ID. The experiment is
            created if necessary. Default: MLFLOW_EXPERIMENT_NAME. With neither an ID nor a name, `start_training`
            raises `ValueError`.
        tags: Tags of the run.
        save_artifact: True to upload the checkpoints at the end.
        logdir: Folder that contains `mlruns`, if the runs are stored there. Default: the run's folder.
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
        from raysgd.core.writers.services import MLflowRun  # imported here: a program without the service needs none

        self._run = MLflowRun(
            tracking_uri, registry_uri, experiment_id, experiment_name, tags, purpose="`MLflowLoggerCallback`"
        )
        self._save_artifact = self.reads_checkpoints = save_artifact
        super().__init__(self._run, logdir, one_rank(worker_to_log))

    def finish_training(self, error: bool = False, **info: Any) -> None:
        with self._sink.warns():
            checkpoints = self.logdir / constants.TRAIN_CHECKPOINT_SUBDIR
            if self._save_artifact and checkpoints.is_dir():
                self._run.add_folder(checkpoints)
        super().finish_training(error=error)


former_names(__name__)
