"""The session of the training function that runs in this process, and facts about the function's trial.

A session sends the function's reports to the driver and receives the driver's answers. There is no session if Ray Tune
itself runs the function as a trial, as in programs written for Ray AIR.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from raysgd.air.config import ScalingConfig
from raysgd.air.reports import UploadOptions
from raysgd.core.engine.shared.types import World
from raysgd.core.private_names import find_name
from raysgd.core.text.log_lines import Once
from raysgd.storage import Folder

if TYPE_CHECKING:
    from raysgd.air.checkpoint import Checkpoint


@dataclass(frozen=True)
class TrialFacts:
    """Facts about a `fit()` run and its trial. In the workers, the training function's session uses them.

    Attributes:
        folder: The trial's folder, which contains the checkpoints.
        experiment_name: Name of the run.
        name: Name of the trial.
        id: Id of the trial.
        scaling: The run's scaling config.
        metadata: The dict that the user passed to the trainer as `metadata`.
        workdir: Folder that becomes the working directory while the function runs. None to keep the working directory.
        keeps_files: True if checkpoints are written as files. If False, only the newest checkpoint is kept, in memory.
    """

    folder: Folder
    experiment_name: str
    name: str
    id: str
    scaling: ScalingConfig
    metadata: Mapping[str, Any] = field(default_factory=dict)
    workdir: str | None = None
    keeps_files: bool = True

    @property
    def directory(self) -> str:
        """The trial's folder: a path, or a URI."""
        return str(self.folder.local_path) if self.folder.is_local else self.folder.uri


class RunningSession(Protocol):
    """Interface of a training function's session. The functions in `raysgd.air.session` call its methods."""

    facts: TrialFacts | None
    accelerator: Any
    membership: Any
    iteration: int

    @property
    def world(self) -> World:
        """This worker's rank and the number of workers."""

    def reports_one_dict(self, keywords: Mapping[str, Any]) -> bool:
        """Return True if the user called `report(metrics=..., checkpoint=...)`, False if each keyword is a metric."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, options: UploadOptions | None = None) -> None:
        """Send metrics to the driver, optionally with a checkpoint."""

    def ask(self, name: str, data: Any = None) -> Any:
        """Ask the driver a question, such as which nodes will go away, and return the driver's answer.

        All ranks must call this method with the same `name`. Each rank may pass its own data.
        """

    def save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Send a checkpoint without metrics to the driver. In functions that `fit` runs, raise an error instead."""

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that the function has saved.

        If the function has not saved a checkpoint yet, return the checkpoint from which the function started, or None.
        In functions that `fit` runs, raise an error instead.
        """

    def current_checkpoint(self) -> Any:
        """Return the newest checkpoint that the function has saved or reported on this worker, as a `Checkpoint`.

        If there is none yet, return the checkpoint from which the function started, or None.
        """

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's shard of a dataset. See `raysgd.air.session.get_dataset_shard`."""


class Alone:
    """A session for code that runs outside a run. It acts as a single worker without a driver.

    With this session, helpers for training functions such as `prepare_model` work outside a run, too.
    """

    accelerator: Any = None
    membership: Any = None

    @property
    def world(self) -> World:
        """The rank and size of a single worker."""
        return place()

    def ask(self, name: str, data: Any = None) -> Any:
        """Return `data` itself. For a single rank, this is the result of a broadcast from rank 0."""
        return data


_alone = Alone()

# A global, not a thread-local variable: a worker process runs one training function at a time, and threads that this
# function starts use the same session.
_current: RunningSession | None = None


def current_session() -> RunningSession | None:
    """Return the session of the training function that runs in this process, or None outside a run."""
    return _current


def helper_session() -> RunningSession | Alone:
    """Return the session of the training function in this process. Outside a run, return an `Alone`.

    An `Alone` acts as the session of a single worker without a driver.
    """
    return _current or _alone


def open_session(session: RunningSession) -> None:
    """Make a session the current session of this process. Called before the training function starts."""
    global _current
    _current = session


def close_session(session: RunningSession | None) -> None:
    """Remove this process's session, unless another session has replaced `session` in the meantime."""
    global _current
    if _current is session:
        _current = None


_once = Once()


def place() -> World:
    """Return this worker's rank and the number of workers. Outside a run, return rank 0 of one worker."""
    session = current_session()
    return session.world if session is not None else World(rank=0, size=1, local_size=0)


def session_or_warning(function: str, stacklevel: int = 3) -> RunningSession | None:
    """Return the session of the training function in this process.

    If no training function runs here, warn that calling `function` has no effect, and return None.

    Args:
        function: Name of the function that the user called. Only its first call causes a warning.
        stacklevel: Passed to `warnings.warn`.
    """
    session = current_session()
    if session is not None:
        return session
    if _once.is_first(function):
        warnings.warn(
            f"`{function}` has no effect: it was called outside a function that a trainer runs.", stacklevel=stacklevel
        )
    return None


def tune_here() -> Any:
    """Return the module `ray.tune` if Ray Tune itself runs the training function as a trial. Otherwise, return None.

    This check uses a private function of Ray. In versions of Ray without this private function, return None.
    """
    if _current is not None:
        return None
    tune = sys.modules.get("ray.tune")
    is_in_trial = None if tune is None else find_name("ray.tune.trainable.trainable_fn_utils:_in_tune_session")
    return tune if is_in_trial is not None and is_in_trial() else None


def report_to(tune: Any, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
    """Pass a report to the Ray Tune trial in this process.

    Ray Tune stores the checkpoint's files before this function returns.
    """
    if checkpoint is None:
        tune.report(dict(metrics))
        return
    with checkpoint.as_directory() as folder:
        tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))


def checkpoint_of(tune: Any) -> Checkpoint | None:
    """Return the newest checkpoint that the Ray Tune trial in this process has reported.

    If the trial has not reported a checkpoint yet, return the checkpoint from which the trial started, or None.
    """
    from raysgd.air.checkpoint import Checkpoint  # imported here because it loads the storage modules

    checkpoint = tune.get_checkpoint()
    return Checkpoint(checkpoint.path, checkpoint.filesystem) if checkpoint is not None else None
