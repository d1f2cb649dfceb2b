"""Functions that a trainer in the driver sends to its workers to be run there.

The first argument of each function is the worker's replica, the object that holds the training operator. These
functions have a module of their own because a worker imports the module of every function that it receives, and must
not import modules of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.core.numbers.results import CallProgress


def execute(replica: Any, fn: Callable[[], Any]) -> Any:
    """Call the user's function without arguments in the worker, and return its result."""
    return fn()


def apply(replica: Any, fn: Callable[[Any], Any]) -> Any:
    """Call the user's function with the worker's training operator, and return its result."""
    return fn(replica.operator)


def epochs_done(replica: Any) -> int:
    """Return how many epochs the worker has completed."""
    return replica.epochs_done


def global_step(replica: Any) -> int:
    """Return how many batches the worker has trained on over all epochs."""
    return replica.operator.global_step


def progress(replica: Any) -> CallProgress | None:
    """Return the progress of the call that the worker is running, or None between calls."""
    return replica.progress()
