"""The functions for training functions as their first version had them: outside of a run they raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from raysgd.train import session

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _strict(function: FunctionT) -> FunctionT:
    @wraps(function)
    def inside_only(*args: Any, **kwargs: Any) -> Any:
        if session.current_session() is None:
            raise ValueError(f"`{function.__name__}` was called outside a training function.")
        return function(*args, **kwargs)

    return inside_only  # type: ignore[return-value]


report = _strict(session.report)
save_checkpoint = _strict(session.save_checkpoint)
load_checkpoint = _strict(session.load_checkpoint)
world_rank = _strict(session.world_rank)
local_rank = _strict(session.local_rank)
world_size = _strict(session.world_size)
get_dataset_shard = _strict(session.get_dataset_shard)
