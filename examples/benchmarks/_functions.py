"""Shared by the benchmarks of training functions: states to save, duration of saves, a worker that dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NUM_TENSORS = 10
_NUM_SAVES = 4


def state_of(num_bytes: int) -> dict[str, Any]:
    """Return a state of this many bytes in a few tensors."""
    import torch

    return {f"weight_{index}": torch.ones(num_bytes // 4 // _NUM_TENSORS) for index in range(_NUM_TENSORS)}


def stalls(save: Callable[[], None], pause_s: float) -> list[float]:
    """Return how long each of several saves took."""
    found = []
    for _ in range(_NUM_SAVES):
        began = time.perf_counter()
        save()
        found.append(time.perf_counter() - began)
        time.sleep(pause_s)
    return found


def die_or_note(folder: Path, rank: int, size: int) -> bool:
    """In the first attempt, wait for all ranks, then rank 1 dies; in the second attempt, note the start."""
    if (folder / "death").exists():
        (folder / f"again_{rank}").write_text(str(time.time()))
        return False
    (folder / f"alive_{rank}").touch()
    while len(list(folder.glob("alive_*"))) < size:
        time.sleep(0.01)
    if rank == 1:
        time.sleep(1)  # the parent must see that the functions run
        (folder / "death").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def recovery_s(folder: Path) -> float:
    """Return the seconds from the death until the last rank started again."""
    began = [float(path.read_text()) for path in folder.glob("again_*")]
    return max(began) - float((folder / "death").read_text())
