"""Who shares a node, and who talks to whom."""

from __future__ import annotations

import pytest

from raysgd.connections.mesh.nodes import Nodes, PowerOfTwoRole, power_of_two_role, tree


def test_ranks_are_told_apart_by_the_address_of_their_node() -> None:
    nodes = Nodes(tuple("abacabb"))
    assert nodes.ranks == [[0, 2, 4], [1, 5, 6], [3]]
    assert nodes.leaders == [0, 1, 3]
    assert nodes.lanes == [[0, 1, 3]], "one node has a single rank"
    assert nodes.in_order == [0, 2, 4, 1, 5, 6, 3]
    assert [nodes.beside(rank) for rank in (4, 1, 3)] == [[0, 2, 4], [1, 5, 6], [3]]
    assert Nodes(tuple("aabbb")).lanes == [[0, 2], [1, 3]]


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


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12, 40, 63, 64])
def test_folding_leaves_a_power_of_two(size: int) -> None:
    ranks = tuple(range(5, 5 + size))
    parts = {rank: power_of_two_role(ranks, rank) for rank in ranks}
    left = parts[5].ranks
    assert len(left) & (len(left) - 1) == 0
    assert len(left) > size / 2
    assert all(part.ranks == left for part in parts.values())
    assert [rank for rank in ranks if parts[rank].place is not None] == list(left)
    assert all(left[part.place] == rank for rank, part in parts.items() if part.place is not None)
    for rank in ranks:
        if rank not in left:
            taker = parts[rank].taker
            assert taker == rank - 1, "the order of ranks stays"
            assert parts[taker].giver == rank
    assert power_of_two_role((0, 1, 2), 2) == PowerOfTwoRole((0, 2), 1)
