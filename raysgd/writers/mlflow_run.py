"""Metrics in a run of MLflow."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from raysgd._nested import flattened
from raysgd._optional import require
from raysgd._secrets import masked

logger = logging.getLogger(__name__)

_default_stores: set[str] = set()  # that this module has chosen: MLflow cannot tell them from those of users


class MLflowRun:
    """Writes to a run of MLflow, the active one of this process.

    Args:
        tracking_uri: Where runs are kept. Default: what `mlflow.set_tracking_uri` or the environment variable
            MLFLOW_TRACKING_URI says, else the folder `mlruns` in that of the run.
        registry_uri: Where models are kept. Default: with the runs, unless MLFLOW_REGISTRY_URI says something else.
        experiment_id: An experiment that exists. Default: the environment variable MLFLOW_EXPERIMENT_ID.
        experiment_name: Else the name of one, which is made if need be. Default: MLFLOW_EXPERIMENT_NAME.
        tags: Tags of the run.
        joins: Whether to write to the run that is active, if there is one, and to leave it open.
        purpose: Who needs MLflow, for the error that it is missing.

    Attributes:
        default_experiment: The name of the experiment if nothing else names one; None for an error.

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
        *,
        joins: bool = False,
        purpose: str = "a run of MLflow",
    ) -> None:
        self._mlflow = require("mlflow", extra="mlflow", purpose=purpose)
        self._tracking_uri, self._registry_uri = tracking_uri, registry_uri
        self._experiment_id, self._experiment_name = experiment_id, experiment_name
        self._tags = dict(tags or {})
        self._joins, self._is_own = joins, True
        self.default_experiment: str | None = None

    def start(self, folder: Path, config: Any, *, name: str | None = None, run_id: str | None = None) -> str:
        """Starts the run, or goes on with one, and logs the config.

        Args:
            folder: The folder of the run of this library.
            config: What its parameters are.
            name: What it is called; None leaves that to MLflow.
            run_id: The run to go on with.

        Returns:
            The id of the run.

        Raises:
            ValueError: No experiment is named.
        """
        active = self._mlflow.active_run() if self._joins else None
        self._is_own = active is None
        if active is None:
            self._choose_store(folder / "mlruns")
            where = {"run_id": run_id} if run_id is not None else {"experiment_id": self._find_experiment()}
            active = self._mlflow.start_run(**where, run_name=name, tags=self._tags)
        if run_id is None:
            self._log_parameters(_by_allowed_names(_parameters(masked(config))))
        return str(active.info.run_id)

    def _log_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Logs them, or those that MLflow takes: a run that is active may have another value of one."""
        try:
            self._mlflow.log_params(parameters)
        except self._mlflow.exceptions.MlflowException as error:
            logger.warning("MLflow does not take all parameters: %s", masked(str(error)))
            for name, value in parameters.items():
                with suppress(self._mlflow.exceptions.MlflowException):
                    self._mlflow.log_param(name, value)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Logs what of the metrics is a number."""
        self._mlflow.log_metrics(_by_allowed_names(numbers_in(metrics)), step=step)

    def add_folder(self, folder: Path) -> None:
        """Uploads a folder, under its own name."""
        self._mlflow.log_artifacts(str(folder), artifact_path=folder.name)

    def close(self, *, has_failed: bool) -> None:
        """Ends the run, if it was started here."""
        if self._is_own:
            self._mlflow.end_run(status="FAILED" if has_failed else "FINISHED")

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
        name = self._experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.default_experiment
        if name is None:
            raise ValueError(
                "MLflow needs an experiment: pass the `experiment_id` of an existing one, or an `experiment_name`."
            )
        found = self._mlflow.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._mlflow.create_experiment(name))


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, also inside of dicts."""
    found = {}
    for name, value in flattened(metrics).items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found


def _parameters(config: Any) -> dict[str, Any]:
    """The config of a function by its names, where it has such."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    return dict(vars(config)) if hasattr(config, "__dict__") else {"config": config}


def _by_allowed_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values; what MLflow allows in no name becomes an underscore.

    >>> from raysgd.utils import BATCH_SIZE
    >>> _by_allowed_names({BATCH_SIZE: 64, "top@5": 0.9})
    {'_batch_size': 64, 'top_5': 0.9}
    """
    return {re.sub(r"[^\w\-. :/]", "_", str(name)) or "_": value for name, value in values.items()}
