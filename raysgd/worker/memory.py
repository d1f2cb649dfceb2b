"""The memory of this process and of its node, and how much larger the share of a rank may get with what is free."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

_USED = 0.8  # of what is free: the rest is a margin


def free_in_node(num_sharing: int) -> int | None:
    """Return this worker's part of the free memory of the node, in bytes; None where that is not known."""
    try:
        words = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2].split(maxsplit=1)
        free = int(words[0]) * 1024
    except (OSError, IndexError):  # not Linux
        return None
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    with suppress(OSError, ValueError):  # without a container, or without a limit
        free = min(free, int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii")))
    return free // num_sharing


def largest_growth(peak: int, free: int | None) -> float:
    """Return how many times larger a share may get.

    Args:
        peak: The most bytes that were in use so far, as if all of them grew with the share.
        free: The bytes that are free now; None where that is not known.
    """
    return 1.0 if free is None or peak <= 0 else 1.0 + _USED * max(free, 0) / peak


def growth_in_node(num_sharing: int) -> float:
    """Return how many times larger the share of this process may get, in the memory of its node."""
    return largest_growth(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, free_in_node(num_sharing))
