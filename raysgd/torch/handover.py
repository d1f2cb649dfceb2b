"""Hands one rank's state to others over the group's own connections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from raysgd.torch.state_codec import EncodedState, StateEncoder, decode


def send(state: Any, ranks: Iterable[int], device: torch.device) -> None:
    """Sends `state` to `ranks`, which must all `receive` at this time."""
    encoded = StateEncoder().encode(state)
    skeleton = torch.frombuffer(bytearray(encoded.skeleton), dtype=torch.uint8)
    buffer = torch.from_numpy(encoded.buffer)
    sizes = torch.tensor([skeleton.numel(), buffer.numel()])
    parts = [part.to(_reachable(device)) for part in (sizes, skeleton, buffer) if part.numel()]
    for rank in ranks:
        for part in parts:
            dist.send(part, rank)


def receive(source: int, device: torch.device) -> Any:
    """What `source` sends; tensors are on the CPU and nobody else's."""
    reachable = _reachable(device)
    sizes = torch.empty(2, dtype=torch.int64, device=reachable)
    dist.recv(sizes, source)
    parts = []
    for size in sizes.tolist():
        part = torch.empty(size, dtype=torch.uint8, device=reachable)
        if size:
            dist.recv(part, source)
        parts.append(part.cpu())
    skeleton, buffer = parts
    return decode(EncodedState(skeleton.numpy().tobytes(), buffer.numpy()), copy=False)


def _reachable(device: torch.device) -> torch.device:
    """Where tensors have to be for the group's transport."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")
