"""The functions that a training function calls: `report`, `get_checkpoint`, `get_world_rank` and so on.

They work in training functions run by `fit` or `Trainer.run`. If Ray Tune runs the function as a trial, `report`,
`get_checkpoint` and the functions that describe the trial call Ray Tune's functions with the same names. The other
functions, and all functions anywhere else, warn once and return a default, so you can call your training function
directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from raysgd.air._running_function import (
    TrialFacts,
    checkpoint_of,
    current_session,
    place,
    report_to,
    session_or_warning,
    tune_here,
)
from raysgd.air.reports import UploadOptions
from raysgd.core.engine.shared.types import World

if TYPE_CHECKING:
    from raysgd.air.checkpoint import Checkpoint

T = TypeVar("T")

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
    is_one_dict = bool(args) or (session is not None and session.reports_one_dict(kwargs))
    metrics, checkpoint, options = _arguments_of(*args, **kwargs) if is_one_dict else (kwargs, None, None)
    if (tune := tune_here()) is not None:
        report_to(tune, metrics, checkpoint)
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
        return checkpoint_of(tune)
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
        value: T = getattr(tune.get_context(), function)()
        return value
    session = session_or_warning(function, stacklevel=4)
    return read(session.facts) if session is not None and session.facts is not None else None
