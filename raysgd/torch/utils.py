"""Helpers for existing code that creates `torch.distributed` process groups itself."""

from __future__ import annotations

import datetime
import os

from raysgd.torch.objects.precision import choose_amp_backend as choose_amp_backend
from raysgd.utils import find_free_port

__all__ = ["choose_amp_backend", "setup_address", "setup_process_group"]


def setup_address() -> str:
    """Return a `tcp://` address with this node's IP and a free port, to pass to `setup_process_group`."""
    import ray

    return f"tcp://{ray.util.get_node_ip_address()}:{find_free_port()}"


def setup_process_group(
    url: str, world_rank: int, world_size: int, timeout: datetime.timedelta, backend: str = "gloo"
) -> None:
    """Join the default `torch.distributed` process group. Return once all `world_size` ranks have joined.

    Args:
        url: Address from `setup_address`, the same on all ranks.
        world_rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Time limit for all ranks to join, and for each collective later on.
        backend: Backend, such as "gloo" or "nccl".
    """
    import torch.distributed as dist

    if backend == "nccl":
        os.environ.setdefault("NCCL_BLOCKING_WAIT", "1")
    dist.init_process_group(backend, init_method=url, rank=world_rank, world_size=world_size, timeout=timeout)
