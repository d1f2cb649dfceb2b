"""Sends one rank's state to other ranks. Each receiver forwards the state to the next receiver.

Everything except tensors is pickled, and unpickling can run arbitrary code. Therefore, pickles are sent only over
connections on which both sides have proved that they belong to the worker group. Connections of gloo and NCCL do not
require this proof. With gloo, the ranks have a mesh of direct, authenticated connections, over which everything is
sent. With NCCL, the pickle is sent over the group's board, an authenticated message store, and tensors are sent over
NCCL through two small buffers on the GPU.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raysgd.core.connections.group import Array
from raysgd.core.connections.mesh.mesh import Bytes
from raysgd.core.connections.mesh.routes import Chain, ChainTransfer
from raysgd.core.connections.torch import board_of_group, mesh_group, wait_for_collectives
from raysgd.core.state.state_codec import EncodedState, decode, lend

STAGED_BYTES = 2**24
"""Size, in bytes, of each of the two buffers on the GPU."""

_KEY_LENGTH = 16
_ARRIVAL_S = 60.0  # longest time, in seconds, that a rank waits for the pickle on the group's board


def send(state: Any, takers: Sequence[int], device: torch.device) -> None:
    """Send `state` to the ranks in `takers`, which must all call `receive` at the same time.

    Args:
        state: Any state that can be pickled.
        takers: Ranks that receive the state, in the order in which they forward it.
        device: Device on which to allocate the buffers if tensors are sent over NCCL.
    """
    encoded, group = lend(state), mesh_group()
    parts = [encoded.buffer, *encoded.apart]
    if group is not None:
        group.send_parts([memoryview(encoded.skeleton), *(part.data for part in parts)], takers)
    elif takers:
        _send_staged(encoded.skeleton, parts, takers, device)


def receive(source: int, takers: Sequence[int], device: torch.device) -> Any:
    """Receive the state that the rank `source` sends to the ranks in `takers`. The received tensors are on the CPU.

    Args:
        source: Rank that calls `send`.
        takers: The argument `takers` of `send`.
        device: Device on which to allocate the buffers if tensors are sent over NCCL.
    """
    group = mesh_group()
    if group is not None:
        head, buffer, *apart = group.receive_parts(source, takers)
        skeleton = head.tobytes()
    else:
        skeleton, (buffer, *apart) = _receive_staged(source, takers, device)
    return decode(EncodedState(skeleton, buffer, tuple(apart)), copy=False)


def _send_staged(skeleton: bytes, parts: Sequence[Array], takers: Sequence[int], device: torch.device) -> None:
    key = secrets.token_bytes(_KEY_LENGTH)
    board_of_group().put(_topic(key), pickle.dumps((skeleton, [part.nbytes for part in parts])))
    chain = _staged_chain(dist.get_rank(), takers, device)
    chain.pass_on(memoryview(bytearray(key)))
    chain.pass_on(*(part.data for part in parts))


def _receive_staged(source: int, takers: Sequence[int], device: torch.device) -> tuple[bytes, list[Array]]:
    chain, key = _staged_chain(source, takers, device), bytearray(_KEY_LENGTH)
    chain.pass_on(memoryview(key))
    skeleton, sizes = pickle.loads(board_of_group().take(_topic(bytes(key)), _ARRIVAL_S))
    parts = [np.empty(size, np.uint8) for size in sizes]
    chain.pass_on(*(part.data for part in parts))
    wait_for_collectives()  # raises if a rank was lost on the way
    return skeleton, parts


def _staged_chain(source: int, takers: Sequence[int], device: torch.device) -> Chain:
    reached = device if dist.get_backend() == "nccl" else torch.device("cpu")
    return Chain(_moving_by_device(reached, STAGED_BYTES), dist.get_rank(), source, takers, STAGED_BYTES)


def _topic(key: bytes) -> str:
    return f"raysgd/state/{key.hex()}"


def _moving_by_device(device: torch.device, num_bytes: int) -> ChainTransfer:
    """Return a function that sends and receives pieces of host memory through two buffers on `device`.

    Args:
        device: Device whose memory the process group can send.
        num_bytes: Size of each buffer in bytes. A piece of host memory must not be larger.
    """
    sent, received = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    newest: Bytes | None = None

    def filled(piece: Bytes) -> torch.Tensor:
        room = sent[: len(piece)]
        if piece is not newest:
            room.copy_(_tensor(piece))
        return room

    def move(outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], /) -> None:
        nonlocal sent, received, newest
        if newest is not None:  # the piece that was received last is sent next; swapping the buffers avoids a copy
            sent, received = received, sent
        works = [dist.isend(filled(piece), rank) for rank, piece in outgoing.items()]
        works += [dist.irecv(received[: len(piece)], rank) for rank, piece in incoming.items()]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        newest = None
        for piece in incoming.values():
            _tensor(piece).copy_(received[: len(piece)])
            newest = piece

    return move


def _tensor(piece: Bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(piece, np.uint8))
