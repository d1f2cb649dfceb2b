"""The folders of a `fit()` run, and an object that presents the run to Ray Tune callbacks.

As in Ray, each run is an experiment that contains one trial:

    <storage>/<name>/                               the experiment: trainer.pkl, run.json
      <Trainer>_<5 hex>_00000_0_<date>/             the trial: result.json, progress.csv, params.json, error.txt, ...
        checkpoint_000000/

The names are the same as in Ray AIR, so programs that read Ray AIR's results work here, too.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raysgd.air.constants import ERROR_FILE
from raysgd.air.reports import EXPERIMENT_TAG
from raysgd.storage import Folder, open_folder
from raysgd.storage._store import make_new

DEFAULT_STORAGE = "~/ray_results"
_CHECKPOINT = re.compile(r"checkpoint_(\d{6,})")
_TRIAL = re.compile(rf"(?P<trainer>.+)_(?P<id>[0-9a-f]{{5}}_\d{{5}})_{EXPERIMENT_TAG}_[-\d]+_[-\d]+")


def checkpoint_name(index: int) -> str:
    """Return the name of the folder of the checkpoint with this number.

    >>> checkpoint_name(3)
    'checkpoint_000003'
    """
    return f"checkpoint_{index:06d}"


def checkpoint_index(name: str) -> int | None:
    """Return a checkpoint's number from its folder's name, or None for any other name.

    >>> checkpoint_index("checkpoint_000003"), checkpoint_index("rank_0")
    (3, None)
    """
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


class TrialFolder:
    """The folders of one run.

    Args:
        experiment: Folder of the experiment, which contains the trial's folder.
        dir_name: Name of the trial's folder.
        is_new: True if the trial's folder is still empty.
        is_finished: True if the run in this folder has succeeded.

    Attributes:
        experiment: Folder of the experiment.
        experiment_name: Name of the experiment's folder.
        trial: The trial's folder, which `Result.path` refers to.
        is_local: True if the trial's files are on a local disk.
        dir_name: Name of the trial's folder.
        name: Name of the trial: the name of the trainer's class and the trial's id.
        id: Id of the trial, such as `1f3a9_00000`.
        trainer_name: Name of the trainer's class.
        is_new: True if the trial's folder was empty when the run started.
        is_finished: True if the run had succeeded before. `fit` then returns its result without running anything.

    Raises:
        ValueError: `dir_name` is not the name of a trial's folder.
    """

    def __init__(self, experiment: Folder, dir_name: str, *, is_new: bool = False, is_finished: bool = False) -> None:
        parts = _TRIAL.fullmatch(dir_name)
        if parts is None:
            raise ValueError(f"`{dir_name}` is not the name of a trial's folder.")
        self.experiment = experiment
        self.dir_name = dir_name
        self.experiment_name = experiment.name
        self.trial = experiment / dir_name
        self.is_local = self.trial.is_local
        self.id = parts["id"]
        self.trainer_name = parts["trainer"]
        self.name = f"{self.trainer_name}_{self.id}"
        self.is_new, self.is_finished = is_new, is_finished
        self._staging: Path | None = None

    @property
    def local_path(self) -> Path:
        """The local folder in which this process writes the trial's files.

        For local storage, this is the trial's folder. For remote storage, it is a temporary folder, whose files the run
        then copies to the trial's folder.
        """
        if self.is_local:
            return self.trial.local_path
        if self._staging is None:
            self._staging = Path(tempfile.mkdtemp(prefix="raysgd-fit-")) / self.experiment_name / self.dir_name
        return self._staging

    def expect_little(self) -> None:
        """Disable retries of storage operations in the run's folders. Call this after the storage has failed."""
        self.experiment, self.trial = self.experiment.without_retries(), self.trial.without_retries()

    def make(self) -> None:
        """Create the folders of the experiment and the trial, and `local_path`."""
        self.experiment.make()
        self.trial.make()
        self.local_path.mkdir(parents=True, exist_ok=True)

    def remove_staging(self) -> None:
        """Delete the temporary folder that `local_path` creates for remote storage, if it exists."""
        if self._staging is not None:
            shutil.rmtree(self._staging.parents[1], ignore_errors=True)
            self._staging = None

    def checkpoint_names(self) -> list[str]:
        """Return the names of the complete checkpoints, oldest first."""
        return checkpoints_in(self.trial.committed())

    @property
    def next_index(self) -> int:
        """The number to give to the next checkpoint: one more than the highest number of an existing checkpoint.

        Incomplete checkpoints count, too. The first checkpoint gets the number 0.
        """
        present = [] if self.is_new else checkpoints_in(self.trial.names())
        return 1 + max((checkpoint_index(name) or 0 for name in present), default=-1)


def checkpoints_in(names: Iterable[str]) -> list[str]:
    """Return the names of checkpoint folders among the given names, oldest first."""
    indices = {name: checkpoint_index(name) for name in names}
    return [name for _, name in sorted((index, name) for name, index in indices.items() if index is not None)]


def new_trial_folder(run_config: Any, trainer_name: str) -> TrialFolder:
    """Return the folders of a new run. If the config has no name, create an experiment folder with a unique name.

    Args:
        run_config: A `RunConfig`. Only its `storage_path`, `storage_filesystem` and `name` are used.
        trainer_name: Name of the trainer's class.

    Raises:
        StorageError: The storage cannot be used.
    """
    root, name = storage_of(run_config), run_config.name
    experiment = root / name if name else make_new(root, new_name(trainer_name))
    return new_trial(experiment, trainer_name)


def new_name(trainer_name: str) -> str:
    """Return the default name of an experiment: the trainer's class and the time."""
    return f"{trainer_name}_{_now()}"


def storage_of(run_config: Any) -> Folder:
    """Return the `Folder` in which a `RunConfig` stores its runs."""
    place = run_config.storage_path or DEFAULT_STORAGE
    return open_folder(place, filesystem=run_config.storage_filesystem, argument="storage_path")


def new_trial(experiment: Folder, trainer_name: str) -> TrialFolder:
    """Return a new trial in an experiment's folder, without creating any folder."""
    identity = f"{secrets.token_hex(3)[:5]}_00000"
    return TrialFolder(experiment, f"{trainer_name}_{identity}_{EXPERIMENT_TAG}_{_now()}", is_new=True)


def _now() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")


class FitTrialView:
    """Presents a `fit()` run as a Ray Tune trial, for callbacks written for Ray Tune.

    Attributes:
        trainable_name: Name of the trainer's class.
        trial_id: Id of the trial, such as `1f3a9_00000`.
        config: The trial's config: `{"train_loop_config": config}` with the config of the training function, or an
            empty dict if the function has no config.
        evaluated_params: Parameters chosen by a search; always empty.
        experiment_tag: `"0"`.
        experiment_dir_name: The name of the experiment's folder.
        local_path: The local folder that loggers write to. `logdir` is its former name.
        local_experiment_path: The parent folder of `local_path`. `local_dir` is its former name.
        path: The path of the trial's folder in its storage.
        status: `"PENDING"`, `"RUNNING"`, `"TERMINATED"` or `"ERROR"`.
        last_result: The last report. Before the first report, a dict with the values known by then, such as the
            trial's id.
        checkpoint: The newest checkpoint, or None.
        num_failures: Number of failed attempts.
    """

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    TERMINATED = "TERMINATED"
    ERROR = "ERROR"

    def __init__(self, folder: TrialFolder, config: Mapping[str, Any]) -> None:
        self._name, self._trial = folder.name, folder.trial
        self.trainable_name = folder.trainer_name
        self.trial_id = folder.id
        self.config = dict(config)
        self.evaluated_params: dict[str, Any] = {}
        self.experiment_tag = EXPERIMENT_TAG
        self.experiment_dir_name = folder.experiment_name
        self.local_path = self.logdir = str(folder.local_path)
        self.local_experiment_path = self.local_dir = str(folder.local_path.parent)
        self.path = folder.trial.path
        self.status = self.PENDING
        self.last_result: dict[str, Any] = {"trial_id": folder.id}
        self.checkpoint: Any = None
        self.num_failures = 0

    def __str__(self) -> str:
        return self._name

    __repr__ = __str__

    @property
    def storage(self) -> Any:
        """The trial's storage, with the attributes that Ray Tune's loggers use."""
        names = {"trial_fs_path": self.path, "storage_filesystem": self._trial.filesystem}
        return SimpleNamespace(**names, experiment_dir_name=self.experiment_dir_name)

    def get_ray_actor_ip(self) -> str:
        """Return the IP address of the driver's machine, or an empty string before the run has started."""
        return str(self.last_result.get("node_ip", ""))

    def init_local_path(self) -> None:
        """Create `local_path`."""
        Path(self.local_path).mkdir(parents=True, exist_ok=True)

    init_logdir = init_local_path

    @property
    def has_reported_at_least_once(self) -> bool:
        """True if the training function has reported at least once."""
        return "training_iteration" in self.last_result

    @property
    def error_file(self) -> str | None:
        """The file with the errors of failed attempts. None if no attempt has failed."""
        return str(Path(self.local_path, ERROR_FILE)) if self.num_failures else None

    def has_checkpoint(self) -> bool:
        """Return True if the trial has a checkpoint."""
        return self.checkpoint is not None
