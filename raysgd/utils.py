"""Small helpers for user code: names of special metrics and keys, meters, timers, and three functions.

The meters and timers are defined in private modules. User code imports them from this module.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, TypeVar

from raysgd.core.config_keys import BATCH_SIZE
from raysgd.core.numbers.meters import BATCH_COUNT, BATCH_WEIGHT, NUM_SAMPLES, AverageMeter, AverageMeterCollection
from raysgd.core.numbers.timing import TimerCollection, TimerStat

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

# A key of `batch_info`, the dict that `train_batch` receives as its second argument. The value is True if this worker
# has no samples in the current step. The batch then repeats other samples, which count with weight 0.
IS_PADDING = "is_padding"

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def check_for_failure(remote_values: Iterable[Any]) -> bool:
    """Wait for the results of Ray tasks or actor calls. Return False if a worker process or node died.

    Args:
        remote_values: Ray's object references to the results, which are read in the order in which they become ready.

    Returns:
        True if all tasks succeeded. False as soon as one task has failed because its worker process or node died. The
        failure is logged.

    Raises:
        Exception: A task failed with another exception, which is raised unchanged.
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
    """Return a decorator for methods, which checks that `interface_class` has a method (or attribute) of the same name.

    Examples:
        >>> class Greeter:
        ...     @override(object)
        ...     def __str__(self) -> str:
        ...         return "hello"

    Raises:
        AssertionError: `interface_class` has no attribute with the name of the decorated method.
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
    """Return the number of a TCP port that is currently free on all network interfaces of this machine."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
