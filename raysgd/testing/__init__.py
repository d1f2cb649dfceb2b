"""Causes real faults, so that you can test how your training handles failures.

The functions cause faults in the processes of a running trainer: a SIGKILL, a SIGSTOP, a pause, a failing write or the
loss of a node. A fault happens at once, or when a process reaches a given point, such as a training step. Until then
the fault is "armed". `docs/recipes/test-with-faults.md` has examples.

A fault that waits for a point in a worker, such as a training step, is armed in the process that has the given rank at
the time of the call. The fault stays in that process even if the rank of the process changes. A process that takes over
the rank later is not affected. A fault that waits for the driver (`IN_DRIVER`) affects the process that has the rank
when the fault happens.
"""

from __future__ import annotations

from raysgd.testing.faults import (
    IN_DRIVER,
    IN_WORKERS,
    disarm,
    fail_save,
    hang_rank,
    kill_worker,
    remove_node,
    slow_rank,
)

__all__ = [
    "IN_DRIVER",
    "IN_WORKERS",
    "disarm",
    "fail_save",
    "hang_rank",
    "kill_worker",
    "remove_node",
    "slow_rank",
]
