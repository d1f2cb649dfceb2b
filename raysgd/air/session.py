"""The functions that a training function calls: `report`, `get_checkpoint`, `get_world_rank` and so on.

They work in training functions run by `fit` or `Trainer.run`. If Ray Tune runs the function as a trial, `report`,
`get_checkpoint` and the functions that describe the trial call Ray Tune's functions with the same names. The other
functions, and all functions anywhere else, warn once and return a default, so you can call your training function
directly.

A session sends the function's reports to the driver and receives the driver's answers. There is no session if Ray Tune
itself runs the function as a trial, as in programs written for Ray AIR.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from numbers import Number
from typing import Any, Protocol, TypeVar

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import ScalingConfig
from raysgd.air.reports import UploadOptions
from raysgd.core.engine.shared.types import World
from raysgd.core.private_names import find_name
from raysgd.core.text.log_lines import Once
from raysgd.storage import Folder

T = TypeVar("T")

_METRIC = Number | str | None

__all__ = [
    "get_checkpoint",
    "get_dataset_shard",
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_metadata",
    "get_node_rank",
    "get_trial_dir",
    "get_trial_id",
    "get_trial_name",
    "get_trial_resources",
    "get_world_rank",
    "get_world_size",
    "report",
]


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
    world = World(rank=0, size=1, local_size=0)

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
    return helper_session().world


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


# ------------------------------------------------------------------------------------- functions that users call


def report(*args: Any, **kwargs: Any) -> None:
    """Send metrics to the driver, optionally with a checkpoint.

    Pass the metrics as one dict, `report({"loss": 0.1}, checkpoint=...)`, where `checkpoint` is a `Checkpoint` or None.
    All workers must report the same number of times.

    You may also pass the metrics as keywords, `report(loss=0.1)`. In this form, a keyword `checkpoint` is a metric like
    any other.

    In functions run by `fit`:

    * The function continues while up to 64 reports wait to be read by the driver. A report with values other than
      numbers and strings waits until the driver has read it. So does a report with a checkpoint, unless the checkpoint
      is a folder that is stored with `ASYNC`.
    * Only the metrics of rank 0 count. Any rank may pass a checkpoint. If several ranks pass checkpoints in folders,
      the folders are merged; if several pass dicts, the dict of the lowest rank is used.
    * You may name both arguments: `report(metrics={"loss": 0.1}, checkpoint=...)`. This form is recognized if `metrics`
      is a dict or if `checkpoint` is not a number, a string or None. Otherwise, all keywords are metrics.
    * With `checkpoint_upload_mode=CheckpointUploadMode.ASYNC`, `report` returns while the files of a checkpoint's
      folder are still being stored, and deletes the folder afterwards. The default, `SYNC`, waits and keeps the folder.
    * `delete_local_checkpoint_after_upload` overrides whether the folder is deleted.
    * Other options of Ray's `report` raise an error with advice; see `UploadOptions`.

    In functions run by `Trainer.run`, `report` waits until the driver has read the metrics. A checkpoint reported with
    a dict of metrics may also be a dict.

    Raises:
        TypeError: The arguments have another form.
        ValueError: An option is not supported.
    """
    session = current_session()
    names_both = isinstance(kwargs.get("metrics"), Mapping) or not isinstance(kwargs.get("checkpoint"), _METRIC)
    is_one_dict = bool(args) or (names_both and session is not None and session.facts is not None)
    metrics, checkpoint, options = _arguments_of(*args, **kwargs) if is_one_dict else (kwargs, None, None)
    if (tune := tune_here()) is not None:
        with nullcontext() if checkpoint is None else checkpoint.as_directory() as folder:
            stored = None if folder is None else tune.Checkpoint.from_directory(folder)
            tune.report(dict(metrics), checkpoint=stored)
        return
    session = session_or_warning("report")
    if session is not None:
        session.report(metrics, checkpoint, options)


def _arguments_of(
    *args: Any, checkpoint: Any = None, **kwargs: Any
) -> tuple[dict[str, Any], Any, UploadOptions | None]:
    options = {each.name: kwargs.pop(each.name) for each in fields(UploadOptions) if each.name in kwargs}
    reports = [*args, kwargs.pop("metrics")] if "metrics" in kwargs else args
    if len(reports) != 1 or not isinstance(reports[0], dict) or kwargs:
        beside = sorted(kwargs if checkpoint is None else [*kwargs, "checkpoint"])
        raise TypeError(
            "`report` accepts either keywords, `report(loss=0.1)`, or one dict and optionally a checkpoint, "
            "`report({'loss': 0.1}, checkpoint=...)`; it was given "
            f"{', '.join(f'{each!r:.200}' for each in reports) or 'no dict'} and the keywords {beside}."
        )
    return reports[0], checkpoint, UploadOptions(**options) if options else None


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint that this worker has reported last.

    If this worker has not reported a checkpoint yet, return the checkpoint that the function started from, or None. A
    function that restarts after a failure starts from the newest checkpoint that any worker reported before the
    failure.
    """
    if (tune := tune_here()) is not None:
        checkpoint = tune.get_checkpoint()
        return Checkpoint(checkpoint.path, checkpoint.filesystem) if checkpoint is not None else None
    session = session_or_warning("get_checkpoint")
    return session.current_checkpoint() if session is not None else None


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this worker's shard of a dataset that you passed to the trainer.

    In a function run by `fit`, a name is required if there are several datasets. If no dataset has this name, return
    None and log the existing names. In a function run by `Trainer.run`, a name is required if you passed a dict of
    datasets.

    Raises:
        RuntimeError: A name is required, and none was passed.
        KeyError: In a function run by `Trainer.run`, no dataset has this name.
    """
    session = session_or_warning("get_dataset_shard")
    return session.dataset_shard(dataset_name) if session is not None else None


class TrainContext:
    """Describes where the training function runs: its rank, the number of workers and the trial. See `get_context`."""

    def get_world_size(self) -> int:
        """Return the number of workers; 1 outside a run."""
        return _place_or_warning("get_world_size").size

    def get_world_rank(self) -> int:
        """Return this worker's rank among all workers; 0 outside a run."""
        return _place_or_warning("get_world_rank").rank

    def get_local_rank(self) -> int:
        """Return this worker's rank among the workers on its node; 0 outside a run."""
        return _place_or_warning("get_local_rank").local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this node; 0 outside a run."""
        return _place_or_warning("get_local_world_size").local_size

    def get_node_rank(self) -> int:
        """Return this node's rank among the nodes with workers; 0 outside a run."""
        return _place_or_warning("get_node_rank").node_rank

    def get_experiment_name(self) -> str | None:
        """Return the run's name.

        This method, the `get_trial_...` methods, `get_metadata` and `get_storage` return None if neither `fit` nor Ray
        Tune runs the function.
        """
        return _of_trial("get_experiment_name", lambda facts: facts.experiment_name)

    def get_trial_name(self) -> str | None:
        """Return the trial's name."""
        return _of_trial("get_trial_name", lambda facts: facts.name)

    def get_trial_id(self) -> str | None:
        """Return the trial's id."""
        return _of_trial("get_trial_id", lambda facts: facts.id)

    def get_trial_resources(self) -> Any:
        """Return the resources of the trial and its workers, as a Ray Tune placement group factory."""
        return _of_trial("get_trial_resources", lambda facts: facts.scaling.as_placement_group_factory())

    def get_trial_dir(self) -> str | None:
        """Return the trial's folder: a path or a URI."""
        return _of_trial("get_trial_dir", lambda facts: facts.directory)

    def get_metadata(self) -> dict[str, Any] | None:
        """Return the dict that was passed to the trainer as `metadata`.

        Raises:
            DeprecationWarning: Ray Tune runs the function. Ray's own `get_metadata` then always raises this error.
        """
        return _of_trial("get_metadata", lambda facts: dict(facts.metadata))

    def get_storage(self) -> Any:
        """Return the trial's folder as a `raysgd.storage.Folder`.

        If Ray Tune runs the function, return Ray's `StorageContext` instead.
        """
        return _of_trial("get_storage", lambda facts: facts.folder)


_context = TrainContext()
get_world_size = _context.get_world_size
get_world_rank = _context.get_world_rank
get_local_rank = _context.get_local_rank
get_local_world_size = _context.get_local_world_size
get_node_rank = _context.get_node_rank
get_experiment_name = _context.get_experiment_name
get_trial_name = _context.get_trial_name
get_trial_id = _context.get_trial_id
get_trial_resources = _context.get_trial_resources
get_trial_dir = _context.get_trial_dir
get_metadata = _context.get_metadata


def get_context() -> TrainContext:
    """Return an object that describes where the training function runs, as in `get_context().get_world_rank()`."""
    return _context


def _place_or_warning(function: str) -> World:
    """Return this worker's rank and the number of workers. Outside a run, warn and return rank 0 of one worker."""
    session_or_warning(function, stacklevel=4)
    return place()


def _of_trial(function: str, read: Callable[[TrialFacts], T]) -> T | None:
    """Return a fact about the trial, such as its name; None if neither `fit` nor Ray Tune runs the training function.

    Args:
        function: Name of the `TrainContext` method that the user called. If Ray Tune runs the training function, the
            fact comes from the method with the same name in Ray Tune's context.
        read: Function that returns the fact from the `TrialFacts` of a `fit` run.
    """
    if (tune := tune_here()) is not None:
        return getattr(tune.get_context(), function)()
    session = session_or_warning(function, stacklevel=4)
    return read(session.facts) if session is not None and session.facts is not None else None
