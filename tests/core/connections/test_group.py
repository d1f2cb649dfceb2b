"""What ranks exchange as arrays; the ranks are threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raysgd.core.arrays.division import even_counts
from raysgd.core.connections.group import MOST, EarlyVotes, Group
from raysgd.core.connections.mesh.mesh import MeshBroken
from raysgd.core.engine.shared.types import LOOPBACK, World
from tests.core.connections.ranks import groups_of


def test_a_replica_that_is_alone_exchanges_nothing() -> None:
    group, numbers = Group(World(0, 1)), np.arange(3.0)
    group.add_up(numbers)
    group.from_first(numbers)
    assert numbers.tolist() == [0.0, 1.0, 2.0]
    assert group.largest(4.0) == 4.0
    assert group.gather_rows(numbers, [3]).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("hosts", ["ab", "aa", "LL", "aabb", "aaaabbbb", "LLLLLLLL", "aaaabbbbc", "LLLLLLLLL"])
def test_sums_are_quick_but_for_large_ones_of_many_ranks(hosts: str) -> None:
    group = Group(World(0, len(hosts)), None, tuple(LOOPBACK if host == "L" else host for host in hosts))
    assert group.is_quick_for(8 * 2**20)
    assert group.is_quick_for(8 * 2**20 + 1) == group.is_quick_for(2**34) == (len(hosts) <= 8)


def test_on_one_node_without_unix_sockets_large_sums_of_three_ranks_are_slow() -> None:
    group = Group(World(0, 3), None, ("a", "a", "a"))
    assert group.is_quick_for(2**20)
    assert not group.is_quick_for(2**20 + 1)


@pytest.fixture(params=[2, 3, 4])
def groups(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    """The groups of some ranks."""
    with groups_of(request.param) as groups:
        yield groups


def on_all(groups: list[Group], function: Callable[[Group], Any]) -> list[Any]:
    """What `function` returns on each rank, all at the same time."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(function, groups))


@pytest.mark.parametrize("length", [1, 500, 40_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bytes_of_each_rank_travel_along_with_a_sum(groups: list[Group], length: int, dtype: Any) -> None:
    given = terms(len(groups), (length,), dtype)
    expected = functools.reduce(np.add, given)
    row = np.arange(12, dtype=np.uint8)

    def add_up(group: Group) -> Any:
        for _ in range(2):  # the second time in the same memory
            numbers = given[group.rank].copy()
            rows = group.add_up_with(numbers, row + group.rank)
        return numbers, rows

    for numbers, rows in on_all(groups, add_up):
        assert numbers.tobytes() == expected.tobytes()
        assert [each.tolist() for each in rows] == [(row + rank).tolist() for rank in range(len(groups))]


def terms(size: int, shape: Any, dtype: Any) -> list[np.ndarray[Any, Any]]:
    """One array for each rank, of numbers whose sum depends on the order in which they are added."""
    generator = np.random.default_rng(7)
    return [np.array(generator.standard_normal(shape) * 10.0 ** (3 * rank), dtype) for rank in range(size)]


@pytest.mark.parametrize("groups", [2, 3, 4, MOST], indirect=True)
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (1000, 100), (2, 50_001)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_sums_are_those_in_the_order_of_ranks_to_the_bit_on_all_ranks(
    groups: list[Group], shape: Any, dtype: Any
) -> None:
    given = terms(len(groups), shape, dtype)
    expected = functools.reduce(np.add, given)
    for _ in range(2):

        def add_up(group: Group) -> Any:
            numbers = given[group.rank].copy()
            group.add_up(numbers)
            return numbers

        for sums in on_all(groups, add_up):
            assert np.array_equal(sums, expected)


@pytest.mark.parametrize("groups", [2, 3, 4, 7], indirect=True)
@pytest.mark.parametrize("width", [5, 100_000])
def test_rows_are_added_in_their_order_whichever_rank_has_them(groups: list[Group], width: int) -> None:
    rows = terms(4, width, np.float32)
    expected = functools.reduce(np.add, rows)
    counts = even_counts(4, len(groups))

    def add_rows(group: Group) -> Any:
        first = sum(counts[: group.rank])
        return group.add_rows(np.stack(rows)[first : first + counts[group.rank]], counts).copy()

    for _ in range(2):  # memory is used again
        for found in on_all(groups, add_rows):
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("groups", [2, 3, 4, 9, 16], indirect=True)
def test_arrays_of_all_ranks_are_gathered(groups: list[Group]) -> None:
    given = terms(len(groups), (2, 3), np.float32)
    for gathered in on_all(groups, lambda group: group.gather(given[group.rank])):
        assert all(np.array_equal(one, other) for one, other in zip(gathered, given, strict=True))
    assert on_all(groups, lambda group: group.largest(float(group.rank))) == [len(groups) - 1.0] * len(groups)
    counts = list(range(len(groups)))
    rows = on_all(groups, lambda group: group.gather_rows(np.full((group.rank, 2), group.rank), counts))
    expected = [[rank] * 2 for rank in counts for _ in range(rank)]
    assert [found.tolist() for found in rows] == [expected] * len(groups)


def test_values_travel_from_one_rank_to_some(groups: list[Group]) -> None:
    value = {"name": "a", "weights": [np.arange(6.0).reshape(2, 3), np.array(1), np.zeros((0, 2))]}
    source, takers = len(groups) - 1, list(range(len(groups) - 1))

    def pass_on(group: Group) -> Any:
        if group.rank != source:
            return group.receive(source, takers)
        group.send(value, takers)
        return value

    for found in on_all(groups, pass_on):
        assert found["name"] == "a"
        assert [part.tolist() for part in found["weights"]] == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 1, []]


def test_numbers_of_another_kind_are_not_added_up_though_they_have_as_many_bytes(groups: list[Group]) -> None:
    def add_up(group: Group) -> str:
        numbers = np.ones(20_000, np.float32) if group.rank else np.ones(10_000, np.float64)
        try:
            group.add_up(numbers)
        except (ValueError, MeshBroken) as error:
            return str(error)
        return "added up"

    told = on_all(groups, add_up)
    assert any("not at the same exchange" in text for text in told)
    assert "added up" not in told


def test_what_has_gaps_cannot_be_added_up_in_place(groups: list[Group]) -> None:
    with pytest.raises(ValueError, match="ascontiguousarray"):
        groups[0].add_up(np.zeros((4, 4))[:, ::2])


def test_votes_that_nobody_wanted_to_hear_do_not_answer_later_questions(groups: list[Group]) -> None:
    """A `fit` that ends before its data leaves one behind; whoever asks next, in another `fit`, gets his own answer."""
    size = len(groups)

    def asked(group: Group) -> list[bool]:
        votes = EarlyVotes(World(group.rank, size), group._mesh)
        votes.ask(True)
        wanted = [votes.ask(group.rank == 0), votes.ask(False)]
        answers = [vote() for vote in wanted]
        votes.ask(True)
        return [*answers, votes.ask(group.rank == size - 1)(), votes.ask(False)()]

    assert on_all(groups, asked) == [[True, False, True, False]] * size
