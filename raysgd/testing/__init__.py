"""Faults on purpose, for tests of what your training does when something breaks.

Each function arms something in the real processes of a running trainer: a SIGKILL, a SIGSTOP, a pause, a write that
fails. Nothing is simulated, and nothing of it is there unless one of these functions was called.
See `docs/recipes/test-with-faults.md`.

A fault is armed in the process that has the rank at that time. It goes with the process, also to another rank; a
process that takes its place later is unharmed.
"""

from __future__ import annotations

from raysgd.testing.files import fail_save
from raysgd.testing.nodes import remove_node
from raysgd.testing.processes import IN_DRIVER, IN_WORKERS, disarm, hang_rank, kill_worker, slow_rank

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
