"""A rank of a group without Ray, in a module that loads only PyTorch, because each rank is a new process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def reduce(
    rank: int, size: int, device: str, backend: str, folder: Path, victim: int | None = None, shrinks: bool = False
) -> None:
    """Sum three tensors over the ranks. Then, if one of them is to die, form a group of the others.

    Args:
        rank: This rank.
        size: Number of ranks.
        device: "cuda" or "cpu".
        backend: "nccl" or "gloo".
        folder: Where the ranks meet. Results are written there, by rank.
        victim: Rank to die.
        shrinks: True to form the other group with `shrink_group`, False to abort the group and to form a new one.
    """
    own = torch.device(device, rank % torch.cuda.device_count() if device == "cuda" else 0)
    store = dist.FileStore(str(folder / f"store-{victim}-{shrinks}"), size)
    options: dict[str, Any] = {"device_id": own} if shrinks else {}
    if device == "cuda":
        torch.cuda.set_device(own)
        torch.cuda.synchronize()  # has a context
    before = _free_bytes(device, store, "before", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    dist.all_reduce(torch.ones(1, device=own))
    used = before - _free_bytes(device, store, "after", size)
    for num_bytes in (2**10, 2**22, 100 * 2**20):
        numbers = torch.full((num_bytes // 4,), float(rank + 1), device=own)
        dist.all_reduce(numbers)
        assert float(numbers[-1]) == size * (size + 1) / 2
    if victim is None:
        num_on_a_gpu = -(-size // max(1, torch.cuda.device_count()))
        if device == "cuda":
            (folder / f"communicator_mib-{rank}").write_text(str(used / num_on_a_gpu / 2**20))
        dist.destroy_process_group()
        return
    numbers = torch.ones(25 * 2**20, device=own)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if backend == "nccl":  # gloo cannot be aborted
        dist.all_reduce(numbers, async_op=True)
    time.sleep(0.5)
    began, group = time.monotonic(), dist.group.WORLD
    if shrinks:
        dist.shrink_group([victim], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    else:
        if backend == "nccl":
            group.abort()
        (folder / f"abort_s-{rank}").write_text(str(time.monotonic() - began))
        dist.destroy_process_group()
        survivors = [each for each in range(size) if each != victim]
        store = dist.FileStore(str(folder / "store-of-survivors"), len(survivors))
        dist.init_process_group(backend, store=store, rank=survivors.index(rank), world_size=len(survivors))
    numbers = torch.ones(1, device=own)
    dist.all_reduce(numbers)
    assert float(numbers) == size - 1
    (folder / f"{'shrink_s' if shrinks else 'abort_and_new_group_s'}-{rank}").write_text(str(time.monotonic() - began))
    os._exit(0)  # the first group is broken


def _free_bytes(device: str, store: Any, name: str, size: int) -> int:
    """Return the free bytes of this rank's GPU when all ranks have come here; 0 without a GPU."""
    _meet(store, name, size)
    if device == "cuda":
        torch.cuda.synchronize()
    free: int = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    _meet(store, f"{name}, seen", size)
    return free


def _meet(store: Any, name: str, size: int) -> None:
    store.add(name, 1)
    while store.add(name, 0) < size:
        time.sleep(0.01)
