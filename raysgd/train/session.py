"""The functions that a training function calls: `report`, `save_checkpoint`, `world_rank` and so on.

Outside a run they only warn once, so you can call your function by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from raysgd._once import Once
from raysgd.exceptions import SessionMisuseError
from raysgd.train._messages import TrainingResult, TrainingResultType
from raysgd.train._session import Session, current_session

__all__ = [
    "Session",
    "SessionMisuseError",
    "TrainingResult",
    "TrainingResultType",
    "current_session",
    "get_dataset_shard",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]

_UNSET: Any = type("_Unset", (), {"__repr__": lambda self: "<unset>"})()
_once = Once()


def report(*args: Any, checkpoint: Any = _UNSET, **kwargs: Any) -> None:
    """Sends metrics to the driver, and waits until the driver has read them.

    Pass the metrics as keywords, `report(loss=0.1)`, where `checkpoint` is a name like any other. Or pass them as one
    dict, `report({"loss": 0.1}, checkpoint=...)`, where `checkpoint` is None or a dict to save with them. Every worker
    must report the same number of times.

    Raises:
        TypeError: Anything else.
    """
    if not args:
        metrics, saved = dict(kwargs), None
        if checkpoint is not _UNSET:
            metrics["checkpoint"] = checkpoint
    else:
        metrics, saved = _positional(args, kwargs, checkpoint)
    session = _session_or_warning("report")
    if session is not None:
        session.report(metrics, saved)


def _positional(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], checkpoint: Any
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    if len(args) > 1 or not isinstance(args[0], dict) or kwargs:
        raise TypeError(
            "`report` takes either keywords, `report(loss=0.1)`, or one dict, `report({'loss': 0.1})` and perhaps "
            f"`checkpoint`; it was given {args!r} and the keywords {sorted(kwargs)}."
        )
    if checkpoint is _UNSET or checkpoint is None:
        return args[0], None
    if not isinstance(checkpoint, Mapping):
        raise TypeError(f"`checkpoint={checkpoint!r}`: need a dict, or None.")
    return args[0], checkpoint


def save_checkpoint(**kwargs: Any) -> None:
    """Saves the keywords as a checkpoint. Every worker must call it; the checkpoint of rank 0 is kept.

    The state is copied once before this returns. It is sent and written while the function continues.
    """
    session = _session_or_warning("save_checkpoint")
    if session is not None:
        session.save_checkpoint(kwargs)


def load_checkpoint() -> dict[str, Any] | None:
    """The newest checkpoint of this run, or the one that the run started from; None if there is none."""
    session = _session_or_warning("load_checkpoint")
    return session.checkpoint if session is not None else None


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """This worker's part of the dataset that you passed to `run`; by its name if you passed a dict of them.

    Raises:
        RuntimeError: There are several, and no name was given.
        KeyError: There is none of that name.
    """
    session = _session_or_warning("get_dataset_shard")
    if session is None:
        return None
    shard = session.shard
    if shard is None:
        warnings.warn("No dataset was passed to `run`, so there is no shard: `None` is returned.", stacklevel=2)
        return None
    if not isinstance(shard, dict):
        return shard
    if dataset_name is None:
        raise RuntimeError(f"There are several datasets: choose one of {sorted(shard)}, with `dataset_name`.")
    if dataset_name not in shard:
        raise KeyError(f"There is no dataset {dataset_name!r}: there are {sorted(shard)}.")
    return shard[dataset_name]


def world_rank() -> int:
    """This worker's rank among all; 0 outside a run."""
    session = current_session()
    return session.world.rank if session is not None else 0


def local_rank() -> int:
    """This worker's rank among those on its node; 0 outside a run."""
    session = current_session()
    return session.world.local_rank if session is not None else 0


def world_size() -> int:
    """The number of workers; 1 outside a run."""
    session = current_session()
    return session.world.size if session is not None else 1


def _session_or_warning(function: str) -> Session | None:
    """The current session; without one, a warning, once for each function."""
    session = current_session()
    if session is not None:
        return session
    if _once.is_first(function):
        warnings.warn(
            f"`{function}` has no effect: it was called outside a function that a trainer runs.", stacklevel=3
        )
    return None
