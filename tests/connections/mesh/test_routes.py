"""Which way messages take between ranks that are not all connected."""

from __future__ import annotations

import pytest

from raysgd.connections.mesh.routes import neighbors, next_of_all, next_of_one, others

SIZES = range(1, 71)


def ways_of_all(source: int, size: int) -> dict[int, list[int]]:
    """The ranks that what `source` says to all passes, by the rank that it reaches."""
    ways, todo = {source: [source]}, [source]
    while todo:
        rank = todo.pop()
        for other in next_of_all(rank, source, size):
            assert other in neighbors(rank, size)
            assert other not in ways, "it came before"
            ways[other] = [*ways[rank], other]
            todo.append(other)
    return ways


def way_of_one(source: int, destination: int, size: int) -> list[int]:
    way = [source]
    while way[-1] != destination:
        way.append(next_of_one(way[-1], destination, size))
    return way


@pytest.mark.parametrize("size", SIZES)
def test_what_is_said_to_all_reaches_each_rank_once_and_what_is_said_to_one_goes_the_same_way(size: int) -> None:
    for source in range(size):
        ways = ways_of_all(source, size)
        assert ways == {rank: way_of_one(source, rank, size) for rank in range(size)}
        assert max(map(len, ways.values())) <= 1 + size.bit_length()


@pytest.mark.parametrize("size", SIZES)
def test_neighbors_are_few_and_know_each_other(size: int) -> None:
    found = [neighbors(rank, size) - {rank} for rank in range(size)]
    assert found == [neighbors(rank, size) for rank in range(size)]
    assert all(rank in found[other] for rank in range(size) for other in found[rank])
    assert all(len(each) <= 2 * (size - 1).bit_length() for each in found)
    assert neighbors(0, 32) == {1, 2, 4, 8, 16, 24, 28, 30, 31}


def test_few_ranks_are_all_connected() -> None:
    assert all(neighbors(rank, size) == others(rank, size) for size in (1, 2, 3, 4, 5, 7) for rank in range(size))
    assert neighbors(0, 6) == {1, 2, 4, 5}


def test_what_is_there_goes_nowhere() -> None:
    with pytest.raises(ValueError, match="for rank 5 of 4 came back to rank 1"):
        next_of_one(1, 5, 4)
