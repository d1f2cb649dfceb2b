"""The processes of a `DataLoader`: how it loads, and that they end with the process that they load for.

A process that was forked holds the connections of its parent open. As long as one is left, no one notices that the
parent was killed: not the other ranks, and not Ray. PyTorch lets such a process look for its parent every 5 s only.
"""

from __future__ import annotations

import gc
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        gc.freeze()  # what was garbage in the parent may have threads that do not exist here
        _end_with(os.getppid())
        if self.user_function is not None:
            self.user_function(worker_id)


def _end_with(pid: int) -> None:
    """Ends this process as soon as the process `pid` is gone. Does nothing where the system cannot tell (Linux can)."""
    try:
        handle = os.pidfd_open(pid)  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, OSError):
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while not poll.poll():
            pass
        os._exit(1)

    threading.Thread(target=wait, name="raysgd-parent", daemon=True).start()
