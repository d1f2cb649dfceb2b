"""A rank of a group without Ray, in a module that loads only PyTorch, because each rank is a new process."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def reduce(rank: int, size: int, device: str, backend: str, folder: Path, victim: int | None) -> None:
    """Sum three tensors over the ranks. Then, if one of them is to die, end the group in the others."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(folder / f"store-{victim}"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    for num_bytes in (2**10, 2**22, 100 * 2**20):
        numbers = torch.full((num_bytes // 4,), float(rank + 1), device=device)
        dist.all_reduce(numbers)
        assert float(numbers[-1]) == size * (size + 1) / 2
    if victim is None:
        dist.destroy_process_group()
        return
    numbers = torch.ones(25 * 2**20, device=device)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began, work = time.monotonic(), dist.all_reduce(numbers, async_op=True)
    time.sleep(0.5)
    group: Any = dist.group.WORLD
    if backend == "nccl":
        group.abort()
    else:
        with suppress(RuntimeError):  # gloo notices a closed connection by itself
            work.wait()
    (folder / f"aborted-{rank}").write_text(str(time.monotonic() - began - 0.5))
    os._exit(0)  # the group is broken
