"""Bytes that one rank hands to several others; the ranks are threads."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from raysgd.connections.mesh.chain import Chain
from raysgd.connections.mesh.mesh import Bytes, Mesh, MeshBroken
from tests.connections.mesh.test_mesh import connected, on_all

PIECE = 1000
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE + 3]
CONTENT = [secrets.token_bytes(size) for size in SIZES]


@pytest.fixture(params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Mesh]]:
    """The meshes of so many ranks."""
    meshes = [lane for [lane] in connected(request.param)]
    yield meshes
    for mesh in meshes:
        mesh.close()


class Counted:
    """A mesh that counts what it is told to move.

    Args:
        mesh: What moves it.

    Attributes:
        sent: How many bytes to each rank.
        largest: The most bytes of one move.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.sent: dict[int, int] = {}
        self.largest = 0

    def __call__(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], /) -> None:
        for rank, piece in outgoing.items():
            self.sent[rank] = self.sent.get(rank, 0) + len(piece)
        self.largest = max(self.largest, *map(len, (b"", *outgoing.values(), *incoming.values())))
        self._mesh.swap(outgoing, incoming)


def handed_over(move: Any, rank: int, takers: list[int]) -> list[bytes]:
    """What a rank has in the end."""
    rooms = [bytearray(content) if rank == 0 else bytearray(len(content)) for content in CONTENT]
    Chain(move, rank, 0, takers, PIECE).pass_on(*map(memoryview, rooms))
    return [bytes(room) for room in rooms]


def test_all_takers_get_everything_and_no_rank_sends_it_twice(ranks: list[Mesh]) -> None:
    takers = list(range(1, len(ranks)))[::-1]
    counted = [Counted(mesh) for mesh in ranks]
    answers = on_all(ranks, lambda rank, mesh: handed_over(counted[rank], rank, takers))
    assert [answer.result() for answer in answers] == [CONTENT] * len(ranks)
    way = [0, *takers]
    for rank, after in itertools.pairwise(way):
        assert counted[rank].sent == {after: sum(SIZES)}
    assert counted[way[-1]].sent == {}
    assert max(each.largest for each in counted) == PIECE


def test_ranks_that_take_nothing_need_not_be_there() -> None:
    meshes = [lane for [lane] in connected(4)]
    present = {0: meshes[0], 3: meshes[3]}
    answers = on_all(meshes, lambda rank, mesh: handed_over(mesh.swap, rank, [3]) if rank in present else [])
    assert [answer.result() for answer in answers] == [CONTENT, [], [], CONTENT]
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_whoever_dies_on_the_way_leaves_nobody_waiting(lost: int) -> None:
    """The giver, one that passes on, or the last."""
    meshes = [lane for [lane] in connected(4)]
    is_halfway = threading.Event()
    size = 64 * 2**20  # more than what all sockets on the way hold

    def hand_over(rank: int, mesh: Mesh) -> str:
        num_moves = 0

        def move(outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], /) -> None:
            nonlocal num_moves
            num_moves += 1
            if rank == lost and num_moves == 3:
                is_halfway.set()
                mesh.close()
            mesh.swap(outgoing, incoming)

        try:
            Chain(move, rank, 0, [1, 2, 3]).pass_on(memoryview(bytearray(size)))
        except MeshBroken:
            return "told"
        return "done"

    answers = on_all(meshes, hand_over)
    assert is_halfway.is_set()
    assert [answer.result() for answer in answers] == ["told"] * 4
    for mesh in meshes:
        mesh.close()
