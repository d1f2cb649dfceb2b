"""The functions that a training function calls: `report`, `get_checkpoint`, `get_context`, `world_rank` and so on.

Functions that Ray 2.0 had in `ray.air.session` are defined in `raysgd.air.session`.
"""

from __future__ import annotations

from typing import Any

from raysgd.air import session as of_air
from raysgd.air._running_function import current_session, place, session_or_warning
from raysgd.air.reports import PreemptionInfo
from raysgd.air.session import *  # noqa: F403 - this module offers all of its names too
from raysgd.air.session import TrainContext, get_context
from raysgd.exceptions import SessionMisuseError
from raysgd.train._worker.function_session import Session
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
    """Save the keyword arguments as a checkpoint. All workers must call this; the checkpoint of rank 0 is kept.

    The state is copied before this returns; it is sent and written while the function continues. This is for functions
    of `Trainer.run`; with `fit`, pass a `Checkpoint` to `report`.
    """
    session = session_or_warning("save_checkpoint")
    if session is not None:
        session.save_checkpoint(kwargs)


def load_checkpoint() -> dict[str, Any] | None:
    """Return the newest checkpoint of this run, or the one that the run started from; None if there is none.

    This is for functions of `Trainer.run`; with `fit`, use `get_checkpoint`.
    """
    session = session_or_warning("load_checkpoint")
    return session.load_checkpoint() if session is not None else None


def get_preemption_info() -> PreemptionInfo | None:
    """Return the nodes of workers that, according to Ray, will be taken away soon; None if there are none.

    All workers must call this, and get the same answer. If there are such nodes, report a checkpoint: the driver then
    moves the workers off these nodes, and the function continues elsewhere.

    If SIGTERM or SIGUSR1 has told the program to end, the answer has all nodes. Report a checkpoint, and return: the
    driver ends the run, and the next one continues.
    """
    session = session_or_warning(PREEMPTION)
    return session.ask(PREEMPTION) if session is not None else None


def world_rank() -> int:
    """Return this worker's rank among all workers; 0 outside a run."""
    return place().rank


def local_rank() -> int:
    """Return this worker's rank among those on its node; 0 outside a run."""
    return place().local_rank


def world_size() -> int:
    """Return the number of workers; 1 outside a run."""
    return place().size
