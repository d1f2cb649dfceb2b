"""The training function that runs in this process: its session, and what it can ask about its trial.

Ray Tune may run it itself as a trial, as in programs for Ray AIR; then there is no session.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from raysgd._private_names import find_name
from raysgd._text.log_lines import Once
from raysgd.air.config import ScalingConfig
from raysgd.air.reports import UploadOptions
from raysgd.engine.shared.types import World
from raysgd.storage import Folder

if TYPE_CHECKING:
    from raysgd.air.checkpoint import Checkpoint


@dataclass(frozen=True)
class TrialFacts:
    """The facts that a function can ask about its run, and that its worker needs to store checkpoints.

    Attributes:
        folder: The folder of the trial.
        experiment_name: The name of the run.
        name: The name of the trial.
        id: The trial's identity.
        scaling: What the run was asked to use.
        metadata: What the trainer was given as `metadata`.
        workdir: The working directory of the function; None to leave it alone.
        keeps_files: Whether checkpoints are written; otherwise the newest one is kept in memory.
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
        """The folder of the trial: a path, or a URI."""
        return str(self.folder.local_path) if self.folder.is_local else self.folder.uri


class RunningSession(Protocol):
    """One run of a function in this process, as far as the function can ask it."""

    facts: TrialFacts | None
    accelerator: Any
    membership: Any
    iteration: int

    @property
    def world(self) -> World:
        """The place of this worker."""

    def reports_one_dict(self, keywords: Mapping[str, Any]) -> bool:
        """Return whether the keywords of `report` are one dict of metrics and a checkpoint, and not a metric each."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, options: UploadOptions | None = None) -> None:
        """Send metrics, and perhaps a checkpoint with them."""

    def ask(self, name: str, data: Any = None) -> Any:
        """Return what the driver answers to a question that all ranks ask, each with its data."""

    def save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Send a checkpoint."""

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint, or the one that the function started from."""

    def current_checkpoint(self) -> Any:
        """Return the same as a `Checkpoint`."""

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's part of a dataset."""


class Alone:
    """What helpers share where a function is called by itself: it has the place of a worker alone, and no driver."""

    accelerator: Any = None
    membership: Any = None

    @property
    def world(self) -> World:
        """The place of a worker alone."""
        return place()

    def ask(self, name: str, data: Any = None) -> Any:
        """Return what the only rank sends."""
        return data


_alone = Alone()

# One function runs at a time in a worker process; threads that it starts see the same session.
_current: RunningSession | None = None


def current_session() -> RunningSession | None:
    """Return the session of the function that runs in this process; None outside a run."""
    return _current


def helper_session() -> RunningSession | Alone:
    """Return what the helpers of the function that runs in this process share; outside a run, those of one worker."""
    return _current or _alone


def open_session(session: RunningSession) -> None:
    """Make a session the one of this process."""
    global _current
    _current = session


def close_session(session: RunningSession | None) -> None:
    """Leave this process without a session, if it has this one."""
    global _current
    if _current is session:
        _current = None


_once = Once()


def place() -> World:
    """Return this worker's place; outside a run, that of a worker alone."""
    session = current_session()
    return session.world if session is not None else World(rank=0, size=1, local_size=0)


def session_or_warning(function: str, stacklevel: int = 3) -> RunningSession | None:
    """Return the current session; without one, warn, once for each function."""
    session = current_session()
    if session is not None:
        return session
    if _once.is_first(function):
        warnings.warn(
            f"`{function}` has no effect: it was called outside a function that a trainer runs.", stacklevel=stacklevel
        )
    return None


def tune_here() -> Any:
    """Return `ray.tune` where that runs the function itself; None elsewhere. Ray keeps this question private."""
    if _current is not None:
        return None
    tune = sys.modules.get("ray.tune")
    is_in_trial = None if tune is None else find_name("ray.tune.trainable.trainable_fn_utils:_in_tune_session")
    return tune if is_in_trial is not None and is_in_trial() else None


def report_to(tune: Any, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
    """Hand a report to the trial, which stores the files of a checkpoint before this returns."""
    if checkpoint is None:
        tune.report(dict(metrics))
        return
    with checkpoint.as_directory() as folder:
        tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))


def checkpoint_of(tune: Any) -> Checkpoint | None:
    """Return what the trial goes on from."""
    from raysgd.air.checkpoint import Checkpoint  # not for every function: it loads what reads stores

    found = tune.get_checkpoint()
    return Checkpoint(found.path, found.filesystem) if found is not None else None
