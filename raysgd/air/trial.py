"""The trial that callbacks are shown: a run of `fit()` with the attributes of a trial of Ray Tune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raysgd.air.constants import ERROR_FILE, ERROR_PICKLE_FILE
from raysgd.air.layout import EXPERIMENT_TAG, TrialFolder


class FitTrialView:
    """A run of `fit()`, as callbacks that are written for Ray Tune see it.

    Attributes:
        trainable_name: The name of the trainer's class.
        trial_id: Identity of the trial, such as `1f3a9_00000`.
        config: The config of the trial: `{"train_loop_config": ...}`.
        evaluated_params: Parameters that a search has chosen: none.
        experiment_tag: `"0"`.
        status: `"PENDING"`, `"RUNNING"`, `"TERMINATED"` or `"ERROR"`.
        last_result: The metrics of the last report; before the first one, only what is known without it.
        checkpoint: The newest checkpoint, or None.
        relative_logdir: The name of the trial's folder.
        placement_group_factory: The resources of the trial.
        storage: Where the trial is stored, as Ray Tune describes it.
    """

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    TERMINATED = "TERMINATED"
    ERROR = "ERROR"

    def __init__(self, folder: TrialFolder, config: Mapping[str, Any], resources: Any = None) -> None:
        self._folder = folder
        self.trainable_name = folder.trainer_name
        self.trial_id = folder.id
        self.config = dict(config)
        self.evaluated_params: dict[str, Any] = {}
        self.experiment_tag = EXPERIMENT_TAG
        self.status = self.PENDING
        self.last_result: dict[str, Any] = {"trial_id": folder.id}
        self.checkpoint: Any = None
        self.relative_logdir = folder.dir_name
        self.placement_group_factory = resources
        self.log_to_file: tuple[str | None, str | None] = (None, None)
        self.run_metadata = SimpleNamespace(num_failures=0, error_filename=None, pickled_error_filename=None)
        self.temporary_state = SimpleNamespace(location=_Location("", ""))
        self.storage = _TrialStorage(folder)

    def __str__(self) -> str:
        return self._folder.name

    __repr__ = __str__

    # ------------------------------------------------------------------------------------------------ where it is

    @property
    def local_path(self) -> str:
        """The folder on this machine where loggers write."""
        return str(self._folder.local_path)

    logdir = local_path
    """The same, by its former name."""

    @property
    def path(self) -> str:
        """The folder of the trial in its storage."""
        return self._folder.trial.path

    @property
    def local_experiment_path(self) -> str:
        """The folder above `local_path`."""
        return str(self._folder.local_path.parent)

    local_dir = local_experiment_path
    """The same, by its former name."""

    @property
    def experiment_dir_name(self) -> str:
        """The name of the experiment's folder."""
        return self._folder.experiment_name

    @property
    def node_ip(self) -> str:
        """The address of the machine that the driver runs on."""
        return str(self.temporary_state.location.hostname)

    def get_ray_actor_ip(self) -> str:
        """The same, by its former name."""
        return self.node_ip

    def init_local_path(self) -> None:
        """Makes `local_path`."""
        Path(self.local_path).mkdir(parents=True, exist_ok=True)

    init_logdir = init_local_path

    # ------------------------------------------------------------------------------------------------ how it is

    @property
    def has_reported_at_least_once(self) -> bool:
        """True if there was a report."""
        return "training_iteration" in self.last_result

    @property
    def num_failures(self) -> int:
        """The number of attempts that have failed."""
        return int(self.run_metadata.num_failures)

    @property
    def error_file(self) -> str | None:
        """The file that says what went wrong; None when nothing did."""
        return str(Path(self.local_path, ERROR_FILE)) if self.num_failures else None

    def get_error(self) -> str | None:
        """Return what went wrong, in words; None when nothing did."""
        return Path(self.error_file).read_text(encoding="utf-8") if self.error_file else None

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint."""
        return self.checkpoint is not None

    def is_finished(self) -> bool:
        """Return whether it has ended, well or not."""
        return self.status in (self.TERMINATED, self.ERROR)

    def set_status(self, status: str) -> None:
        """Sets `status`."""
        self.status = status

    def update_last_result(self, result: dict[str, Any]) -> None:
        """Sets `last_result`."""
        self.last_result = result
        self.temporary_state.location = _Location(result.get("node_ip", ""), result.get("pid", ""))

    def count_failure(self) -> None:
        """Counts an attempt that failed."""
        self.run_metadata.num_failures += 1
        self.run_metadata.error_filename = ERROR_FILE
        self.run_metadata.pickled_error_filename = ERROR_PICKLE_FILE


class _Location:
    """The place where a trial runs, in the words of Ray's progress reporters."""

    def __init__(self, hostname: Any, pid: Any) -> None:
        self.hostname = hostname
        self.pid = pid

    def __str__(self) -> str:
        return f"{self.hostname}:{self.pid}" if self.pid else ""


class _TrialStorage:
    """The storage of a trial, by the names that loggers of Ray Tune use."""

    def __init__(self, folder: TrialFolder) -> None:
        self._folder = folder
        self.experiment_dir_name = folder.experiment_name
        self.trial_fs_path = folder.trial.path

    @property
    def storage_filesystem(self) -> Any:
        """A `pyarrow.fs.FileSystem`."""
        return self._folder.trial.filesystem
