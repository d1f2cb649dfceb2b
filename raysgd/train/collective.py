"""Small exchanges between the workers of a function through the driver: for decisions, not for tensors."""

from __future__ import annotations

from typing import TypeVar

from raysgd.air._running_function import helper_session
from raysgd.train._worker.messages import BROADCAST

__all__ = ["barrier", "broadcast_from_rank_zero"]

T = TypeVar("T")


def broadcast_from_rank_zero(data: T) -> T:
    """Return rank 0's value on all workers. All of them must call this; it waits for the last one.

    Raises:
        TypeError: It cannot be pickled.
    """
    found: T = helper_session().ask(BROADCAST, data)
    return found


def barrier() -> None:
    """Wait until all workers have called this."""
    helper_session().ask(BROADCAST)
