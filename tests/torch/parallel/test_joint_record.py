"""Ranks that compare what they did in a call, over real connections between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raysgd.connections.mesh.board import Board, neighbors, others
from raysgd.connections.mesh.meeting import Deadline, Endpoint
from raysgd.connections.mesh.mesh import Mesh, MeshBroken, NotAligned
from raysgd.connections.mesh.words import RankStatements
from raysgd.exceptions import UnevenStepsError
from raysgd.torch.parallel.joint_record import JointRecord
from tests.helpers.fakes import meeting


class Rank:
    """One of two, with its connections to the other one."""

    def __init__(self, rank: int, on_board: Any, in_mesh: Any) -> None:
        self.other = 1 - rank
        self.board, self.mesh = Board(rank, 2, on_board), Mesh(in_mesh, timeout_s=600)
        self.record = JointRecord(lambda: words)
        words = RankStatements(rank, 2, self.board, self.leave)

    def exchange(self, what: str, num_bytes: int = 8) -> None:
        self.record.note(what)
        room = memoryview(bytearray(num_bytes))
        self.mesh.swap({self.other: memoryview(bytes(num_bytes))}, {self.other: room})

    def leave(self) -> None:
        self.mesh.interrupt()
        self.board.interrupt()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    endpoints = [Endpoint("127.0.0.1") for _ in range(2)]
    place = meeting(*(endpoint.port for endpoint in endpoints))

    def connect(rank: int) -> Rank:
        lanes = [neighbors(rank, 2), others(rank, 2)]
        return Rank(rank, *endpoints[rank].connect(place, rank, lanes, Deadline(60)))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(connect, range(2)))
    yield found
    for rank in found:
        rank.mesh.close()
        rank.board.close()


def go_through(ranks: list[Rank], *calls: Callable[[Rank], Any]) -> list[Any]:
    """What each rank has recorded of its call in the end, or the exception that it ended with."""
    for rank in ranks:
        rank.record.begin()

    def go(rank: Rank, call: Callable[[Rank], Any]) -> Any:
        try:
            with rank.record.of_call():
                call(rank)
        except Exception as error:
            return error
        return rank.record.work

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(go, ranks, calls))


def repeating(num: int, what: str = "model 1 exchanged") -> Callable[[Rank], None]:
    def call(rank: Rank) -> None:
        for _ in range(num):
            rank.exchange(what)

    return call


def test_ranks_that_do_the_same_come_to_the_same_record_in_each_call(ranks: list[Rank]) -> None:
    for num in (3, 0, 40):
        first, second = go_through(ranks, repeating(num), repeating(num))
        assert first == second
        assert (first.num, first.is_over) == (num, True)


def test_what_is_done_between_two_calls_does_not_count(ranks: list[Rank]) -> None:
    first, _ = go_through(ranks, repeating(2), repeating(2))
    ranks[0].record.note("something")
    assert ranks[0].record.work == first


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_goes_on_when_the_other_one_has_ended_is_told_instead_of_waiting(
    ranks: list[Rank], is_late: bool
) -> None:
    has_ended = threading.Event()

    def goes_on(rank: Rank) -> None:
        repeating(2)(rank)
        if is_late:
            assert has_ended.wait(60)
        rank.exchange("model 1 exchanged")

    def ends(rank: Rank) -> None:
        repeating(2)(rank)
        threading.Timer(0.2, has_ended.set).start()

    error, work = go_through(ranks, goes_on, ends)
    assert isinstance(error, UnevenStepsError)
    assert "on rank 0 model 1 exchanged 3 times; on rank 1 model 1 exchanged 2 times" in str(error)
    assert ranks[0].record.has_parted
    assert work.num == 2


def test_a_rank_that_repeats_something_before_its_last_step_is_told_too(ranks: list[Rank]) -> None:
    def ends(rank: Rank) -> None:
        repeating(1)(rank)
        rank.record.note("optimizer 1 stepped")

    error, _ = go_through(ranks, repeating(2), ends)
    assert isinstance(error, UnevenStepsError)
    assert "on rank 0 model 1 exchanged 2 times, optimizer 1 stepped 0 times; on rank 1" in str(error)


def test_ranks_at_exchanges_of_different_sizes_are_both_told_what_the_other_one_did(ranks: list[Rank]) -> None:
    errors = go_through(ranks, lambda rank: rank.exchange("a"), lambda rank: rank.exchange("b", num_bytes=9))
    assert [type(error) for error in errors] == [UnevenStepsError] * 2
    assert all("on rank 0 a once, b 0 times; on rank 1 a 0 times, b once" in str(error) for error in errors)


def test_a_rank_that_fails_is_told_at_once_by_those_that_have_ended(ranks: list[Rank]) -> None:
    has_ended = threading.Event()
    ranks[1].board.on_idle = lambda: None  # it says nothing by itself

    def fails(rank: Rank) -> None:
        assert has_ended.wait(60)
        rank.record.note("model 1 exchanged")
        raise NotAligned("of another size")

    error, _ = go_through(ranks, fails, lambda rank: threading.Timer(0.2, has_ended.set).start())
    assert isinstance(error, UnevenStepsError)
    assert "on rank 0 model 1 exchanged once; on rank 1 model 1 exchanged 0 times" in str(error)


def test_a_loss_is_a_loss(ranks: list[Rank]) -> None:
    def dies(rank: Rank) -> None:
        repeating(2)(rank)
        rank.leave()
        raise OSError("gone")

    survived, _ = go_through(ranks, repeating(3), dies)
    assert type(survived) is MeshBroken
    assert not ranks[0].record.has_parted


def test_in_another_group_there_is_nothing_to_compare_before_a_call_began(ranks: list[Rank]) -> None:
    go_through(ranks, repeating(2), repeating(2))
    ranks[0].record.forget()
    assert ranks[0].record.work is None
