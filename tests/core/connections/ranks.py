"""Ranks that are threads, connected to each other, and processes that no group knows."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from raysgd.core.connections.group import Group
from raysgd.core.connections.mesh import meeting
from raysgd.core.connections.mesh.board import Board, neighbors, others
from raysgd.core.connections.mesh.meeting import Address, ConnectFailed, Endpoint
from raysgd.core.connections.mesh.mesh import Mesh
from raysgd.core.engine.shared.types import LOOPBACK, Rendezvous, World
from tests.helpers import fakes

RankT = TypeVar("RankT")


class Deadline:
    """How long a rank waits for others, if it is not interrupted."""

    def __init__(self, timeout_s: float, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        self._until, self._is_interrupted = time.monotonic() + timeout_s, is_interrupted

    def __call__(self) -> None:
        if self._is_interrupted() or time.monotonic() > self._until:
            raise ConnectFailed("another rank failed, or was too slow to join the group")


def connect_to(address: Address) -> socket.socket:
    """A stranger's connection to where a rank listens."""
    connection = meeting._socket_for(address)
    connection.settimeout(20)
    connection.connect(meeting._name_of(address))
    return connection


def met(leads: Sequence[Sequence[Collection[int]]]) -> tuple[Rendezvous, list[list[dict[int, socket.socket]]]]:
    """Where ranks met, and the connections of each, by lane; `leads` says where each lane of each rank leads."""
    endpoints = [Endpoint(LOOPBACK) for _ in leads]
    place, deadline = fakes.meeting(*(endpoint.port for endpoint in endpoints)), Deadline(60)
    with ThreadPoolExecutor(len(leads)) as pool:
        found = pool.map(lambda rank: endpoints[rank].connect(place, rank, leads[rank], deadline), range(len(leads)))
        return place, list(found)


@contextmanager
def meshes_of(size: int, timeout_s: float = 60) -> Iterator[list[Mesh]]:
    """The mesh of each rank."""
    meshes = [Mesh(lane, timeout_s) for [lane] in met([[others(rank, size)] for rank in range(size)])[1]]
    yield meshes
    for mesh in meshes:
        mesh.close_sockets()


@contextmanager
def groups_of(size: int) -> Iterator[list[Group]]:
    """The group of each rank, to be used in a thread of its own."""
    with meshes_of(size) as meshes:
        yield [Group(World(rank, size), mesh) for rank, mesh in enumerate(meshes)]


@contextmanager
def boards_of(size: int) -> Iterator[list[Board]]:
    """The board of each rank."""
    lanes = met([[neighbors(rank, size)] for rank in range(size)])[1]
    boards = [Board(rank, size, lane) for rank, [lane] in enumerate(lanes)]
    yield boards
    for board in boards:
        board.close_sockets()


def on_all(ranks: Sequence[RankT], function: Callable[[int, RankT], Any]) -> list[Future[Any]]:
    """What `function` returns or raises on each rank, all at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [pool.submit(function, number, rank) for number, rank in enumerate(ranks)]
