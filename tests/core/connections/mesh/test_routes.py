"""Sums over many ranks, which are threads, and over several nodes, which are names."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from raysgd.core.connections.group import LEAST_PART_BYTES, MAX_WHOLE_BYTES, MOST, Group
from raysgd.core.connections.mesh.mesh import Bytes, Mesh, MeshBroken
from raysgd.core.connections.mesh.routes import Chain, Nodes, tree
from raysgd.core.engine.shared.types import World
from tests.core.connections.ranks import meshes_of, on_all

SMALL, LARGE = MAX_WHOLE_BYTES // 8, MAX_WHOLE_BYTES // 8 + 1  # of numbers


@dataclass
class Counted(Mesh):
    """A mesh that counts what it sends.

    Attributes:
        sent: The sizes of the messages to each rank.
    """

    connections: Mapping[int, socket.socket]
    sent: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.connections, 20.0)

    def swap(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], kind: int = 0) -> None:
        for rank, content in outgoing.items():
            self.sent.setdefault(rank, []).append(len(content))
        super().swap(outgoing, incoming, kind)

    @property
    def num_messages(self) -> int:
        return sum(map(len, self.sent.values()))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group."""

    meshes: Sequence[Counted]
    hosts: Sequence[str]

    def each(self, function: Callable[[Group], Any]) -> list[Any]:
        """What `function` returns on each of them, all at the same time."""
        size = len(self.meshes)
        for mesh in self.meshes:
            mesh.sent.clear()
        groups = [Group(World(rank, size), mesh, self.hosts) for rank, mesh in enumerate(self.meshes)]
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(function, groups))

    def bytes_leaving(self, host: str) -> int:
        """What ranks of this node sent to others."""
        return sum(
            sum(sizes)
            for rank, mesh in enumerate(self.meshes)
            if self.hosts[rank] == host
            for other, sizes in mesh.sent.items()
            if self.hosts[other] != host
        )


@pytest.fixture
def make() -> Any:
    """Makes groups, which are ended after the test."""
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:

        def make(size: int, hosts: str = "") -> Ranks:
            connections: list[dict[int, socket.socket]] = [{} for _ in range(size)]
            for one in range(size):
                for other in range(one):
                    connections[one][other] = stack.enter_context(socket.create_connection(server.getsockname()))
                    connections[other][one] = stack.enter_context(server.accept()[0])
            return Ranks([Counted(each) for each in connections], tuple(hosts) or ("here",) * size)

        yield make


def added_up(group: Group, size: int, dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    """The sum of numbers for which it matters in which order they are added."""
    numbers = np.array(np.random.default_rng(group.rank).standard_normal(size) * 10.0 ** (group.rank % 5), dtype)
    if size > 1:
        numbers[0] = np.array([0x7FF8000000000000 + group.rank], np.uint64).view(np.float64)[0]  # a NaN of this rank
    group.add_up(numbers)
    return numbers


def expected(num_ranks: int, size: int) -> np.ndarray[Any, Any]:
    terms = [np.random.default_rng(rank).standard_normal(size) * 10.0 ** (rank % 5) for rank in range(num_ranks)]
    total: np.ndarray[Any, Any] = np.sum(terms, axis=0)
    return total


GROUPS = {
    "a few": "",
    "a power of two": "",
    "others": "",
    "two nodes": "aaaaabbbbb",
    "nodes of all sizes, in any order": "abacaabdddeea",
    "a node for each": "abcdefghijk",
    "a few on two nodes": "aabb",
}
NUM_RANKS = {"a few": MOST, "a power of two": 16, "others": 13}


@pytest.mark.parametrize("name", GROUPS)
def test_all_ranks_come_to_the_same_bits(make: Any, name: str) -> None:
    hosts = GROUPS[name]
    ranks = make(len(hosts) or NUM_RANKS[name], hosts)
    num_ranks = len(ranks.meshes)
    for size in (0, 1, 5, SMALL, LARGE, num_ranks * LEAST_PART_BYTES // 8 + 7):
        sums = ranks.each(lambda group, size=size: added_up(group, size))
        assert {one.tobytes() for one in sums} == {sums[0].tobytes()}
        np.testing.assert_allclose(sums[0][1:], expected(num_ranks, size)[1:], rtol=1e-9, atol=1e-9)
        floats = ranks.each(lambda group, size=size: added_up(group, size, np.float32))
        assert {one.tobytes() for one in floats} == {floats[0].tobytes()}


@pytest.mark.parametrize("num_ranks", [16, 40])
def test_a_rank_of_many_sends_few_messages(make: Any, num_ranks: int) -> None:
    ranks, rounds_of_all = make(num_ranks), (num_ranks - 1).bit_length()

    def most() -> int:
        return max(mesh.num_messages for mesh in ranks.meshes)

    for size in (SMALL, LARGE):
        ranks.each(lambda group, size=size: added_up(group, size))
        assert most() == rounds_of_all
        assert sum(mesh.num_messages for mesh in ranks.meshes) == 2 * (num_ranks - 1)
    ranks.each(lambda group: added_up(group, num_ranks * LEAST_PART_BYTES // 8))
    assert most() == 2 * (num_ranks - 1), "parts are large enough"
    assert ranks.each(lambda group: group.largest(float(group.rank))) == [num_ranks - 1.0] * num_ranks
    assert most() == rounds_of_all
    ranks.each(lambda group: group.from_first(np.zeros(10)))
    assert most() == rounds_of_all
    assert sum(mesh.num_messages for mesh in ranks.meshes) == num_ranks - 1


def test_what_leaves_a_node_is_as_much_as_with_a_ring_through_all_ranks(make: Any) -> None:
    hosts = "aaaabbbbcccc"
    ranks = make(len(hosts), hosts)
    size = 2 * LARGE
    ranks.each(lambda group: added_up(group, size))
    for host in "abc":
        assert ranks.bytes_leaving(host) == pytest.approx(2 * 2 / 3 * size * 8, rel=0.001)
    ranks.each(lambda group: added_up(group, 10))
    assert [ranks.bytes_leaving(host) for host in "abc"] == [2 * 80] * 3, "from the first ranks to each other"


@pytest.mark.parametrize(("num_ranks", "hosts"), [(3, ""), (12, ""), (12, "abacabdddbca")])
def test_rank_0_tells_all_others(make: Any, num_ranks: int, hosts: str) -> None:
    ranks = make(num_ranks, hosts)
    for size in (1, 200_000):

        def told(group: Group, size: int = size) -> set[float]:
            numbers = np.full(size, group.rank + 5.0)
            group.from_first(numbers)
            return set(numbers.tolist())

        assert ranks.each(told) == [{5.0}] * num_ranks
        for host in set(ranks.hosts):
            times = ranks.bytes_leaving(host) / (8 * size)
            assert times <= (num_ranks if size == 1 else 1)
        assert sum(mesh.num_messages for mesh in ranks.meshes) % (num_ranks - 1) == 0


def test_ranks_are_told_apart_by_the_address_of_their_node() -> None:
    nodes = Nodes(tuple("abacabb"))
    assert nodes.ranks == [[0, 2, 4], [1, 5, 6], [3]]
    assert nodes.leaders == [0, 1, 3]
    assert nodes.columns == [[0, 1, 3]], "one node has a single rank"
    assert nodes.in_order == [0, 2, 4, 1, 5, 6, 3]
    assert [nodes.beside(rank) for rank in (4, 1, 3)] == [[0, 2, 4], [1, 5, 6], [3]]
    assert Nodes(tuple("aabbb")).columns == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("hosts", "are_shared"), [("a", False), ("aaa", False), ("abc", False), ("abb", True)])
def test_nodes_are_shared_where_there_are_several_with_more_than_one_rank_on_some(hosts: str, are_shared: bool) -> None:
    assert Nodes(tuple(hosts)).are_shared is are_shared


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 40, 100])
def test_the_first_of_some_ranks_reaches_all_others_once_and_in_a_few_rounds(size: int) -> None:
    ranks = [10 + 3 * place for place in range(size)]
    heard_in_round = {ranks[0]: 0}
    waiting = [ranks[0]]
    while waiting:
        rank = waiting.pop(0)
        for number, other in enumerate(tree(ranks, rank)[1], 1):
            assert other not in heard_in_round
            assert tree(ranks, other)[0] == rank
            heard_in_round[other] = heard_in_round[rank] + number
            waiting.append(other)
    assert sorted(heard_in_round) == ranks
    assert max(heard_in_round.values()) <= (size - 1).bit_length()
    assert tree(ranks, ranks[0])[0] is None


PIECE = 1000
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE + 3]
CONTENT = [secrets.token_bytes(size) for size in SIZES]


def handed_over(move: Any, rank: int, takers: list[int]) -> list[bytes]:
    """What a rank has in the end."""
    rooms = [bytearray(content) if rank == 0 else bytearray(len(content)) for content in CONTENT]
    Chain(move, rank, 0, takers, PIECE).pass_on(*map(memoryview, rooms))
    return [bytes(room) for room in rooms]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_takers_get_everything_and_no_rank_sends_it_twice(make: Any, num_ranks: int) -> None:
    way, meshes = [0, *range(num_ranks - 1, 0, -1)], make(num_ranks).meshes
    answers = on_all(meshes, lambda rank, mesh: handed_over(mesh.swap, rank, way[1:]))
    assert [answer.result() for answer in answers] == [CONTENT] * num_ranks
    for rank, after in itertools.pairwise(way):
        assert {other: sum(sizes) for other, sizes in meshes[rank].sent.items()} == {after: sum(SIZES)}
        assert max(meshes[rank].sent[after]) == PIECE
    assert meshes[way[-1]].sent == {}


def test_ranks_that_take_nothing_need_not_be_there() -> None:
    with meshes_of(4) as meshes:
        answers = on_all(meshes, lambda rank, mesh: handed_over(mesh.swap, rank, [3]) if rank in (0, 3) else [])
        assert [answer.result() for answer in answers] == [CONTENT, [], [], CONTENT]


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_whoever_dies_on_the_way_leaves_nobody_waiting(lost: int) -> None:
    """The giver, one that passes on, or the last."""
    is_halfway = threading.Event()
    size = 64 * 2**20  # more than what all sockets on the way hold

    def hand_over(rank: int, mesh: Mesh) -> str:
        num_moves = 0

        def move(outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes], /) -> None:
            nonlocal num_moves
            num_moves += 1
            if rank == lost and num_moves == 3:
                is_halfway.set()
                mesh.close_sockets()
            mesh.swap(outgoing, incoming)

        try:
            Chain(move, rank, 0, [1, 2, 3]).pass_on(memoryview(bytearray(size)))
        except MeshBroken:
            return "told"
        return "done"

    with meshes_of(4) as meshes:
        answers = on_all(meshes, hand_over)
        assert is_halfway.is_set()
        assert [answer.result() for answer in answers] == ["told"] * 4
