"""The processes of a `DataLoader`: how it loads, and that they end with the process that they load for.

PyTorch lets such a process look for its parent every 5 s only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd.streams.loaders import end_with_parent

_KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
)


def kept_options(loader: Any, *more: str) -> dict[str, Any]:
    """Return how a user's `DataLoader` loads: what another loader over the same dataset is made with."""
    return {name: getattr(loader, name) for name in (*_KEPT_OPTIONS, *more)}


@dataclass(frozen=True)
class EndsWithParent:
    """A `worker_init_fn` that calls the user's own."""

    user_function: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        end_with_parent()
        if self.user_function is not None:
            self.user_function(worker_id)
