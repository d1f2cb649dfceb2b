"""Writes metrics to experiment tracking services: MLflow, Weights & Biases, and Comet."""

from __future__ import annotations

import logging
import os
import re
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from raysgd.core.imports import require
from raysgd.core.numbers.results import flattened
from raysgd.core.text.secrets import masked
from raysgd.core.writers.sinks import Sink


class ServiceRun(Sink):
    """Writes metrics to a run of a tracking service.

    If a run of the service is active in this process, that run is used and stays open. Otherwise, a new run is started.

    Args:
        package: The service's Python package.
        extra: The extra of raysgd that installs the package.
        purpose: What needs the package, for the error if the package is missing.
        name: Name of a new run. Default: the name of the raysgd run.

    Attributes:
        run_id: ID of the service's run. If this ID is set before `open`, the run with this ID is continued. A new
            raysgd run ignores the ID.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """

    def __init__(self, package: str, extra: str, purpose: str, name: str | None = None) -> None:
        require(package, extra, purpose)
        self._package, self._extra, self._name = package, extra, name
        self.run_id: str | None = None
        self._run: Any = None
        self._is_own = False

    @property
    def _service(self) -> Any:
        """The service's Python package.

        The package is imported on each use, because a sink that stores a module cannot be copied.
        """
        return require(self._package, self._extra)

    def open(self, run: Any, first_step: int | None = None) -> None:
        self.run_id = self.run_id if first_step else None
        active = self._active()
        self._is_own = active is None
        self._run = self._start(run) if active is None else active

    def close(self, *, has_failed: bool = False) -> None:
        run, self._run = self._run, None
        if self._is_own and run is not None:
            self._end(run, has_failed)

    @abstractmethod
    def _active(self) -> Any:
        """Return the service's run that is active in this process, or None."""

    @abstractmethod
    def _start(self, run: Any) -> Any:
        """Start a run of the service. If `run_id` is set, continue the run with that ID.

        Args:
            run: The raysgd run.
        """

    @abstractmethod
    def _end(self, started: Any, has_failed: bool) -> None:
        """End a run of the service that this sink started.

        Args:
            started: The service's run.
            has_failed: True if the raysgd run has failed.
        """


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that `float` can convert, as floats. Metrics in nested dicts get names such as `val/loss`."""
    numbers = {}
    for name, value in flattened(metrics).items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers


logger = logging.getLogger(__name__)

# URIs that this module has passed to `mlflow.set_tracking_uri` as defaults. MLflow itself cannot distinguish them from
# a URI that the user has set.
_default_stores: set[str] = set()


class MLflowRun(ServiceRun):
    """Writes metrics to an MLflow run.

    Args:
        tracking_uri: URI of the store for runs. Default: the value of `mlflow.set_tracking_uri` or of the environment
            variable MLFLOW_TRACKING_URI, otherwise the folder `mlruns` in the raysgd run's folder.
        registry_uri: URI of the store for models. Default: MLFLOW_REGISTRY_URI if it is set, otherwise the store for
            runs.
        experiment_id: ID of an existing experiment. Default: the environment variable MLFLOW_EXPERIMENT_ID.
        experiment_name: Name of the experiment if there is no ID, or no experiment with this ID. The experiment is
            created if necessary. Default: MLFLOW_EXPERIMENT_NAME, otherwise the name of the raysgd run. If this run has
            no name either, `open` raises `ValueError`.
        tags: Tags to set on the run. A run that was already active keeps its own tags.
        joins: True to write to the active run if there is an active run.
        name: Name of a new run.
        purpose: What needs MLflow, for the error if MLflow is missing.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        registry_uri: str | None = None,
        experiment_id: str | None = None,
        experiment_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        *,
        joins: bool = False,
        name: str | None = None,
        purpose: str = "a run of MLflow",
    ) -> None:
        super().__init__("mlflow", "mlflow", purpose, name)
        self._tracking_uri, self._registry_uri = tracking_uri, registry_uri
        self._experiment_id, self._experiment_name = experiment_id, experiment_name
        self._tags, self._joins = dict(tags or {}), joins

    def open(self, run: Any, first_step: int | None = None) -> None:
        super().open(run, first_step)
        if self.run_id is None:
            self._log_parameters(_by_allowed_names(_parameters(masked(run.config))))
        self.run_id = str(self._run.info.run_id)

    def _active(self) -> Any:
        return self._service.active_run() if self._joins else None

    def _start(self, run: Any) -> Any:
        self._choose_store(run.folder / "mlruns")
        where = {"experiment_id": self._find_experiment(run.name)} if self.run_id is None else {"run_id": self.run_id}
        return self._service.start_run(**where, run_name=self._name or run.name, tags=self._tags)

    def _end(self, started: Any, has_failed: bool) -> None:
        self._service.end_run(status="FAILED" if has_failed else "FINISHED")

    def _log_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Log the parameters of a run. If MLflow rejects any of them, log them one by one and skip the rejected ones.

        MLflow rejects a parameter to which an active run has already assigned another value.
        """
        try:
            self._service.log_params(parameters)
        except self._service.exceptions.MlflowException as error:
            logger.warning("MLflow rejected some parameters, which are skipped: %s", masked(str(error)))
            for name, value in parameters.items():
                with suppress(self._service.exceptions.MlflowException):
                    self._service.log_param(name, value)

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Log the numeric metrics of a row."""
        self._service.log_metrics(_by_allowed_names(numbers_in(row)), step=step)

    def add_folder(self, folder: Path) -> None:
        """Upload a folder to the run, as an artifact with the folder's name."""
        self._service.log_artifacts(str(folder), artifact_path=folder.name)

    def _choose_store(self, default: Path) -> None:
        mlflow = self._service
        is_chosen = mlflow.is_tracking_uri_set() and mlflow.get_tracking_uri() not in _default_stores
        if self._tracking_uri or not is_chosen:
            mlflow.set_tracking_uri(self._tracking_uri or str(default))
        if not self._tracking_uri and not is_chosen:
            _default_stores.add(str(default))
            # MLflow 3 requires this variable for a store in a folder.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        if self._registry_uri:
            mlflow.set_registry_uri(self._registry_uri)

    def _find_experiment(self, default: str | None) -> str:
        identity = self._experiment_id or os.environ.get("MLFLOW_EXPERIMENT_ID")
        if identity is not None:
            try:
                return str(self._service.get_experiment(experiment_id=identity).experiment_id)
            except self._service.exceptions.MlflowException:
                logger.warning("there is no MLflow experiment %s; looking for one by name", identity)
        name = self._experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or default
        if name is None:
            raise ValueError(
                "MLflow needs an experiment: pass the `experiment_id` of an existing one, or an `experiment_name`."
            )
        experiment = self._service.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment is not None else self._service.create_experiment(name))


def _parameters(config: Any) -> dict[str, Any]:
    """Return the config of a training function as a dict of parameters. The config may be of any type."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    return dict(vars(config)) if hasattr(config, "__dict__") else {"config": config}


def _by_allowed_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with names that MLflow allows, replacing forbidden characters with underscores.

    >>> from raysgd.utils import BATCH_SIZE
    >>> _by_allowed_names({BATCH_SIZE: 64, "top@5": 0.9})
    {'_batch_size': 64, 'top_5': 0.9}
    """
    return {re.sub(r"[^\w\-. :/]", "_", str(name)) or "_": value for name, value in values.items()}


class WandbRun(ServiceRun):
    """Writes metrics to a Weights & Biases run.

    Args:
        name: Name of a new run.
        purpose: What needs wandb, for the error if wandb is missing.
        options: Arguments of `wandb.init`, such as `project` and `mode`.
    """

    def __init__(self, name: str | None = None, purpose: str = "a run of Weights & Biases", **options: Any) -> None:
        super().__init__("wandb", "wandb", purpose, name)
        self._options = options

    def open(self, run: Any, first_step: int | None = None) -> None:
        super().open(run, first_step)
        self.run_id = str(self._run.id)

    def _active(self) -> Any:
        return self._service.run

    def _start(self, run: Any) -> Any:
        going_on = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
        options = {"name": self._name or run.name, "dir": str(run.folder), **going_on, **self._options}
        return self._service.init(config=dict(masked(run.config)), **options)

    def write(self, row: Mapping[str, Any], step: int) -> None:
        """Log the numeric metrics of a row."""
        self._run.log(numbers_in(row), step=step)

    def _end(self, started: Any, has_failed: bool) -> None:
        started.finish(exit_code=int(has_failed))


class CometRun(ServiceRun):
    """Writes metrics to a Comet experiment.

    Args:
        online: True to send the experiment to Comet. False to write an archive into the run's folder, for `comet
            upload`.
        name: Name of a new experiment.
        purpose: What needs comet_ml, for the error if comet_ml is missing.
        options: Arguments of Comet's experiment class, such as `project_name` and `workspace`.
    """

    def __init__(
        self, online: bool = True, name: str | None = None, purpose: str = "an experiment of Comet", **options: Any
    ) -> None:
        super().__init__("comet_ml", "comet", purpose, name)
        self._online, self._options = online, options

    def open(self, run: Any, first_step: int | None = None) -> None:
        super().open(run, first_step)
        self._run.log_parameters(flattened(masked(run.config)))
        self.run_id = str(self._run.get_key())

    def _active(self) -> Any:
        active = self._service.get_running_experiment()
        # Ignore an experiment that has ended, which Comet may return.
        return active if active is not None and active.alive else None

    def _start(self, run: Any) -> Any:
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
        """Log the numeric metrics of a row."""
        self._run.log_metrics(numbers_in(row), step=step)

    def _end(self, started: Any, has_failed: bool) -> None:
        started.log_other("status", "failed" if has_failed else "finished")
        started.end()
