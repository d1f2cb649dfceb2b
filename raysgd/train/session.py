"""The functions that a training function calls: `report`, `get_checkpoint`, `get_context`, `world_rank` and so on.

Those that Ray 2.0 had in `ray.air.session` are in `raysgd.air.session`.
"""

from __future__ import annotations

from typing import Any

from raysgd.air._running import current_session, place, session_or_warning
from raysgd.air.reports import CheckpointConsistencyMode, PreemptionInfo, ReportedCheckpoint
from raysgd.air.session import (
    TrainContext,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    get_experiment_name,
    get_local_rank,
    get_local_world_size,
    get_metadata,
    get_node_rank,
    get_trial_dir,
    get_trial_id,
    get_trial_name,
    get_trial_resources,
    get_world_rank,
    get_world_size,
    report,
)
from raysgd.exceptions import SessionMisuseError
from raysgd.train._worker.messages import PREEMPTION, REPORTED, TrainingResult, TrainingResultType
from raysgd.train._worker.session import Session

__all__ = [
    "Session",
    "SessionMisuseError",
    "TrainContext",
    "TrainingResult",
    "TrainingResultType",
    "current_session",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_metadata",
    "get_node_rank",
    "get_preemption_info",
    "get_trial_dir",
    "get_trial_id",
    "get_trial_name",
    "get_trial_resources",
    "get_world_rank",
    "get_world_size",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]


def save_checkpoint(**kwargs: Any) -> None:
    """Saves the keywords as a checkpoint. Every worker must call it; the checkpoint of rank 0 is kept.

    The state is copied once before this returns. It is sent and written while the function continues. For functions
    that `Trainer.run` runs; with `fit`, pass a `Checkpoint` to `report`.
    """
    session = session_or_warning("save_checkpoint")
    if session is not None:
        session.save_checkpoint(kwargs)


def load_checkpoint() -> dict[str, Any] | None:
    """The newest checkpoint of this run, or the one that the run started from; None if there is none.

    For functions that `Trainer.run` runs; with `fit`, use `get_checkpoint`.
    """
    session = session_or_warning("load_checkpoint")
    return session.load_checkpoint() if session is not None else None


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED, timeout_s: float | None = None
) -> list[ReportedCheckpoint]:
    """The checkpoints of the run that are kept, oldest first, with what rank 0 reported with them.

    For functions that `fit` runs. All workers have to call it. It waits for the checkpoint that is on its way.

    Args:
        consistency_mode: Either one: see the class.
        timeout_s: None. The driver answers as soon as that checkpoint is stored.

    Raises:
        ValueError: An argument is something else.
        SessionMisuseError: In a trial of Ray Tune, which keeps the checkpoints itself.
    """
    if not isinstance(consistency_mode, CheckpointConsistencyMode) or timeout_s is not None:
        raise ValueError(
            f"`consistency_mode={consistency_mode!r}, timeout_s={timeout_s!r}`: need a "
            "`raysgd.train.CheckpointConsistencyMode`, and no time: the driver answers as soon as the checkpoint that "
            "is on its way is stored."
        )
    session = session_or_warning(REPORTED)
    found: list[ReportedCheckpoint] | None = session.ask(REPORTED) if session is not None else []
    if found is None:
        raise SessionMisuseError(
            f"`{REPORTED}` is for functions that `fit` runs: a trial of Ray Tune gives its checkpoints to Tune, and "
            "`Trainer.run` keeps those of `save_checkpoint` in its folder."
        )
    return found


def get_preemption_info() -> PreemptionInfo | None:
    """The nodes with workers that Ray says will be taken away soon; None while there are none.

    All workers have to call it, and get the same answer. Report a checkpoint when there are some: behind it the driver
    leaves these nodes by itself, and the function goes on elsewhere.
    """
    session = session_or_warning(PREEMPTION)
    return session.ask(PREEMPTION) if session is not None else None


def world_rank() -> int:
    """This worker's rank among all; 0 outside a run."""
    return place().rank


def local_rank() -> int:
    """This worker's rank among those on its node; 0 outside a run."""
    return place().local_rank


def world_size() -> int:
    """The number of workers; 1 outside a run."""
    return place().size
