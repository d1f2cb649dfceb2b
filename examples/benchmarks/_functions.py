"""What the benchmarks of training functions do alike: states to save, how long saving takes, a worker that dies."""

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
    """A state of so many bytes in a few tensors."""
    import torch

    return {f"weight_{index}": torch.ones(num_bytes // 4 // _NUM_TENSORS) for index in range(_NUM_TENSORS)}


def stalls(save: Callable[[], None], pause_s: float) -> list[float]:
    """How long each of some saves took."""
    found = []
    for _ in range(_NUM_SAVES):
        began = time.perf_counter()
        save()
        found.append(time.perf_counter() - began)
        time.sleep(pause_s)
    return found


def die_or_note(folder: Path, rank: int, size: int) -> bool:
    """In the first life waits for all ranks, then rank 1 dies; in the second one notes when it began."""
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
    """From that death until the last rank began again."""
    began = [float(path.read_text()) for path in folder.glob("again_*")]
    return max(began) - float((folder / "death").read_text())
