"""Processes of one group on this machine, forked so that sixty-four of them start in seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed  # noqa: F401 - before the fork, so that no process imports it again
from _network import Node

from raysgd.core.connections.torch import TorchConnection
from raysgd.core.engine.shared.types import LOOPBACK, Rendezvous, World

_TIMEOUT_S = 600.0


def on_ranks(size: int, function: Callable[..., Any], *args: Any, nodes: Sequence[Node] = ()) -> Any:
    """Run `function(rank, size, *args)` in `size` processes of one gloo group; return the value of rank 0.

    Args:
        size: Number of processes.
        function: Function that each process runs.
        args: Further arguments of the function.
        nodes: Nodes of the processes, the same number on each. Default: this machine, over loopback.

    Raises:
        RuntimeError: A process failed.
    """
    connections = [TorchConnection(timeout_s=_TIMEOUT_S, form_timeout_s=_TIMEOUT_S) for _ in range(size)]
    places = [nodes[rank * len(nodes) // size] if nodes else None for rank in range(size)]
    addresses = []
    for connection, place in zip(connections, places, strict=True):
        host = LOOPBACK if place is None else place.host
        with _inside(place):
            addresses.append((host, connection.open_endpoint(host)))
    rendezvous = Rendezvous(tuple(addresses), on_one_node=not nodes)
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def run(rank: int) -> None:
        with _inside(places[rank]):
            connections[rank].join(rendezvous, World(rank, size))
            value = function(rank, size, *args)
        if rank == 0:
            sending.send(value)
        os._exit(0)  # gloo's threads may abort an interpreter that exits normally

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError as error:
        raise RuntimeError("rank 0 ended without a result") from error
    finally:
        for process in processes:
            process.join()


def _inside(place: Node | None) -> AbstractContextManager[None]:
    return nullcontext() if place is None else place.inside()
