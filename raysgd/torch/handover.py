"""Hands one rank's state to others over the group's own connections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raysgd._state_codec import EncodedState, decode, lend


def send(state: Any, ranks: Iterable[int], device: torch.device) -> None:
    """Sends `state` to `ranks`, which must all `receive` at this time."""
    encoded = lend(state)
    skeleton = np.frombuffer(bytearray(encoded.skeleton), dtype=np.uint8)
    parts = [torch.from_numpy(part) for part in (skeleton, encoded.buffer, *encoded.apart)]
    sizes = torch.tensor([part.numel() for part in parts])
    everything = [torch.tensor([len(parts)]), sizes, *(part for part in parts if part.numel())]
    reachable = _reachable(device)
    everything = [part.to(reachable) for part in everything]
    for rank in ranks:
        for part in everything:
            dist.send(part, rank)


def receive(source: int, device: torch.device) -> Any:
    """What `source` sends; tensors are on the CPU and nobody else's."""
    reachable = _reachable(device)
    count = _receive(torch.empty(1, dtype=torch.int64, device=reachable), source)
    sizes = _receive(torch.empty(int(count), dtype=torch.int64, device=reachable), source)
    parts = [
        _receive(torch.empty(size, dtype=torch.uint8, device=reachable), source).cpu().numpy()
        for size in sizes.tolist()
    ]
    skeleton, buffer, *apart = parts
    return decode(EncodedState(skeleton.tobytes(), buffer, tuple(apart)), copy=False)


def _receive(part: torch.Tensor, source: int) -> torch.Tensor:
    if part.numel():
        dist.recv(part, source)
    return part


def _reachable(device: torch.device) -> torch.device:
    """Where tensors have to be for the group's transport."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")
