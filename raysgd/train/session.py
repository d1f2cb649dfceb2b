"""Functions for use inside a training function: `report`, `get_checkpoint`, `get_context`, `world_rank` and more.

The functions of Ray 2.0's `ray.air.session` are defined in `raysgd.air.session`.
"""

from __future__ import annotations

from typing import Any

from raysgd.air import session as of_air
from raysgd.air.reports import PreemptionInfo
from raysgd.air.session import *  # noqa: F403 - this module re-exports all of its names
from raysgd.air.session import TrainContext, current_session, get_context, place, session_or_warning
from raysgd.exceptions import SessionMisuseError
from raysgd.train._worker.function_replica import Session
from raysgd.train._worker.messages import PREEMPTION, TrainingResult, TrainingResultType

__all__ = [
    "Session",
    "SessionMisuseError",
    "TrainContext",
    "TrainingResult",
    "TrainingResultType",
    "current_session",
    "get_context",
    "get_preemption_info",
    "load_checkpoint",
    "local_rank",
    "save_checkpoint",
    "world_rank",
    "world_size",
]
__all__ += of_air.__all__


def save_checkpoint(**kwargs: Any) -> None:
    """Save the keyword arguments as a checkpoint. All workers must call this; rank 0's checkpoint is stored.

    `save_checkpoint` copies the state and, like `report`, waits until the driver has read its message. The copy is sent
    and written while the function continues. Use it in functions of `Trainer.run`; in functions of `fit`, pass a
    `Checkpoint` to `report` instead.
    """
    session = session_or_warning("save_checkpoint")
    if session is not None:
        session.save_checkpoint(kwargs)


def load_checkpoint() -> dict[str, Any] | None:
    """Return the checkpoint that this worker has saved last.

    If this worker has not saved a checkpoint yet, return the checkpoint that the function started from, or None. A
    function that restarts after a failure starts from the newest checkpoint of the run.

    Use it in functions of `Trainer.run`; in functions of `fit`, use `get_checkpoint` instead.
    """
    session = session_or_warning("load_checkpoint")
    return session.load_checkpoint() if session is not None else None


def get_preemption_info() -> PreemptionInfo | None:
    """Return the workers' nodes that Ray will soon take away; None if all nodes stay.

    All workers must call this, and all get the same answer. If any nodes are about to be taken away, report a
    checkpoint: the driver then starts the workers on other nodes, and the function restarts there from the checkpoint.
    If all of the workers' nodes are about to be taken away, the function restarts only when they are gone.

    If the program received SIGTERM or SIGUSR1, the answer includes all nodes. Report a checkpoint and return: the
    driver then ends the run, and the next run can continue from the checkpoint.
    """
    session = session_or_warning(PREEMPTION)
    return session.ask(PREEMPTION) if session is not None else None


def world_rank() -> int:
    """Return this worker's rank among all workers; 0 outside a run."""
    return place().rank


def local_rank() -> int:
    """Return this worker's rank among the workers on its node; 0 outside a run."""
    return place().local_rank


def world_size() -> int:
    """Return the number of workers; 1 outside a run."""
    return place().size
