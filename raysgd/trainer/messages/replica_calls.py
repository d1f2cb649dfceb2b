"""Functions that a trainer in the driver sends to its workers to be run there.

The first argument of each function is the worker's replica, the object that holds the training operator. These
functions have a module of their own because a worker imports the module of every function that it receives, and must
not import modules of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def execute(replica: Any, fn: Callable[[], Any]) -> Any:
    """Call the user's function without arguments in the worker, and return its result."""
    return fn()


def apply(replica: Any, fn: Callable[[Any], Any]) -> Any:
    """Call the user's function with the worker's training operator, and return its result."""
    return fn(replica.operator)
