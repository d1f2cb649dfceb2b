"""Replica calls: the functions that trainers in the driver run on replicas.

They have a module of their own because a worker imports the module of every function that it receives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.core.numbers.results import CallProgress


def execute(replica: Any, fn: Callable[[], Any]) -> Any:
    """Call a user's function, without arguments, in the replica's process."""
    return fn()


def apply(replica: Any, fn: Callable[[Any], Any]) -> Any:
    """Call a user's function with the replica's operator."""
    return fn(replica.operator)


def epochs_done(replica: Any) -> int:
    """Return the number of completed epochs in this replica's state."""
    done: int = replica.epochs_done
    return done


def global_step(replica: Any) -> int:
    """Return the total number of batches that this replica has trained on."""
    step: int = replica.operator.global_step
    return step


def progress(replica: Any) -> CallProgress | None:
    """Return the progress of the replica's current call."""
    found: CallProgress | None = replica.progress()
    return found
