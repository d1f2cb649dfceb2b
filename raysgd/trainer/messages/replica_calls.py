"""Replica calls: the functions that trainers in the driver run on replicas.

They are in a separate module, because a worker imports the module of each function that it is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.core.numbers.results import CallProgress


def execute(replica: Any, fn: Callable[[], Any]) -> Any:
    """Call a user's function."""
    return fn()


def apply(replica: Any, fn: Callable[[Any], Any]) -> Any:
    """Call a user's function with the operator."""
    return fn(replica.operator)


def epochs_done(replica: Any) -> int:
    """Return the number of epochs in the state of this replica."""
    done: int = replica.epochs_done
    return done


def global_step(replica: Any) -> int:
    """Return how many batches this replica has trained on in all."""
    step: int = replica.operator.global_step
    return step


def progress(replica: Any) -> CallProgress | None:
    """Return the progress of the current call."""
    found: CallProgress | None = replica.progress()
    return found
