"""Small helpers for user code: names of special metrics, meters, timers, and three functions.

The meters and timers are defined in other modules. This module is their public import path.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, TypeVar

from raysgd.core.config_keys import BATCH_SIZE
from raysgd.core.numbers.meters import BATCH_COUNT, BATCH_WEIGHT, NUM_SAMPLES, AverageMeter, AverageMeterCollection
from raysgd.core.numbers.timers import TimerCollection, TimerStat

__all__ = [
    "BATCH_COUNT",
    "BATCH_SIZE",
    "BATCH_WEIGHT",
    "IS_PADDING",
    "NUM_SAMPLES",
    "AverageMeter",
    "AverageMeterCollection",
    "TimerCollection",
    "TimerStat",
    "check_for_failure",
    "find_free_port",
    "override",
]

logger = logging.getLogger(__name__)

# Key of `batch_info`, the second argument of `train_batch`. True if this worker has no samples in the current step. Its
# batch then consists of repeated samples, which have weight 0.
IS_PADDING = "is_padding"

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def check_for_failure(remote_values: Iterable[Any]) -> bool:
    """Wait for the results of Ray tasks. Return True if no worker died.

    Args:
        remote_values: Object references to the results. They are read in the order in which they become ready.

    Returns:
        True if all tasks succeeded. False as soon as a result shows that a worker or node died. The death is logged.

    Raises:
        Exception: A task raised another error. It is raised unchanged.
    """
    import ray
    from ray.exceptions import NodeDiedError, RayActorError, WorkerCrashedError

    waiting = list(remote_values)
    try:
        while waiting:
            ready, waiting = ray.wait(waiting)
            ray.get(ready)
    except (RayActorError, WorkerCrashedError, NodeDiedError) as error:
        logger.exception("a worker died: %s", error)
        return False
    return True


def override(interface_class: type) -> Callable[[FunctionT], FunctionT]:
    """Mark a method as an override of a method of a class or interface.

    Examples:
        >>> class Greeter:
        ...     @override(object)
        ...     def __str__(self) -> str:
        ...         return "hello"

    Raises:
        AssertionError: The class has no attribute with the method's name. Raised when the method is defined.
    """

    def check(method: FunctionT) -> FunctionT:
        if not hasattr(interface_class, method.__name__):
            raise AssertionError(
                f"`{method.__name__}` overrides nothing: `{interface_class.__name__}` has no such attribute. "
                "Correct the name, or remove the decorator."
            )
        return method

    return check


def find_free_port() -> int:
    """Return a TCP port that is currently free on all interfaces of this machine."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
