"""Collectives for small values between the workers of a training function. They go through the driver."""

from __future__ import annotations

from typing import TypeVar

from raysgd.air.session import helper_session
from raysgd.train._worker.messages import BROADCAST

__all__ = ["barrier", "broadcast_from_rank_zero"]

T = TypeVar("T")


def broadcast_from_rank_zero(data: T) -> T:
    """Return rank 0's value of `data` on all workers.

    All workers must call this function. The call blocks until all of them have called it.

    Raises:
        TypeError: This worker's `data` cannot be pickled.
    """
    return helper_session().ask(BROADCAST, data)


def barrier() -> None:
    """Wait until all workers have called this function."""
    helper_session().ask(BROADCAST)
