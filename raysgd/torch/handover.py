"""Hands one rank's state to others over the group's own connections.

Tensors go as they are. The rest is pickled, and what is unpickled can run code: it goes over connections on which both
sides have proved that they belong to the group, which those of gloo and NCCL have not.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raysgd._state_codec import EncodedState, decode, lend
from raysgd.connections.torch import board_of_group

_KEY_LENGTH = 16
_ARRIVAL_S = 60.0  # it was sent before the tensors


def send(state: Any, ranks: Iterable[int], device: torch.device) -> None:
    """Sends `state` to `ranks`, which must all `receive` at this time."""
    encoded = lend(state)
    key = secrets.token_bytes(_KEY_LENGTH)
    board_of_group().put(_topic(key), encoded.skeleton)
    parts = [torch.from_numpy(part) for part in (_numbers(key), encoded.buffer, *encoded.apart)]
    sizes = torch.tensor([part.numel() for part in parts])
    everything = [torch.tensor([len(parts)]), sizes, *(part for part in parts if part.numel())]
    reachable = _reachable(device)
    everything = [part.to(reachable) for part in everything]
    for rank in ranks:
        for part in everything:
            dist.send(part, rank)


def receive(source: int, device: torch.device) -> Any:
    """What `source` sends; tensors are on the CPU and not shared."""
    reachable = _reachable(device)
    count = _receive(torch.empty(1, dtype=torch.int64, device=reachable), source)
    sizes = _receive(torch.empty(int(count), dtype=torch.int64, device=reachable), source)
    parts = [
        _receive(torch.empty(size, dtype=torch.uint8, device=reachable), source).cpu().numpy()
        for size in sizes.tolist()
    ]
    key, buffer, *apart = parts
    skeleton = board_of_group().get(_topic(key.tobytes()), _ARRIVAL_S)
    return decode(EncodedState(skeleton, buffer, tuple(apart)), copy=False)


def _topic(key: bytes) -> str:
    return f"raysgd/state/{key.hex()}"


def _numbers(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(key), dtype=np.uint8)


def _receive(part: torch.Tensor, source: int) -> torch.Tensor:
    if part.numel():
        dist.recv(part, source)
    return part


def _reachable(device: torch.device) -> torch.device:
    """Where tensors have to be for the group's transport."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")
