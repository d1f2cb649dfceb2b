"""What ranks write on a board, all of which read it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from raysgd.connections.mesh.board import Board, BoardTimeout
from raysgd.connections.mesh.meeting import Deadline, Endpoint
from raysgd.connections.mesh.mesh import MeshBroken
from raysgd.connections.mesh.routes import neighbors
from tests.helpers.fakes import meeting

HERE = "127.0.0.1"
LARGE = 2**22  # more than any buffer of a socket holds


def boards_of(size: int) -> list[Board]:
    """The boards of each rank, as threads."""
    endpoints = [Endpoint(HERE) for _ in range(size)]
    place = meeting(*(endpoint.port for endpoint in endpoints))
    lanes = [[neighbors(rank, size)] for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        deadline = Deadline(60)
        found = list(pool.map(lambda rank: endpoints[rank].connect(place, rank, lanes[rank], deadline), range(size)))
    return [Board(rank, size, lane) for rank, [lane] in enumerate(found)]


@pytest.fixture
def boards(request: pytest.FixtureRequest) -> Iterator[list[Board]]:
    """Three ranks, or as many as asked for."""
    found = boards_of(getattr(request, "param", 3))
    yield found
    for board in found:
        board.close()


def on_all(boards: list[Board], function: Callable[[int, Board], Any]) -> list[Future[Any]]:
    """What `function` returns or raises on each rank, all at the same time."""
    with ThreadPoolExecutor(len(boards)) as pool:
        return [pool.submit(function, rank, board) for rank, board in enumerate(boards)]


@pytest.mark.parametrize("boards", [1, 2, 5], indirect=True)
@pytest.mark.parametrize("length", [0, 1, LARGE])
def test_everybody_reads_what_anybody_writes(boards: list[Board], length: int) -> None:
    def write_and_read(rank: int, board: Board) -> list[bytes]:
        board.put(f"of {rank}", bytes([rank]) * length)
        return [board.get(f"of {other}", 20) for other in range(len(boards))]

    for answer in on_all(boards, write_and_read):
        assert answer.result() == [bytes([other]) * length for other in range(len(boards))]


def test_all_values_that_stand_on_a_board_can_be_read_at_once(boards: list[Board]) -> None:
    boards[1].put("word", b"first")
    boards[1].put("word", b"second")
    boards[2].put("other", b"third")
    boards[0].wait(["word", "other"], 20)
    assert sorted(boards[0].values) == [b"second", b"third"]


def test_who_reads_what_is_not_there_yet_waits_for_it(boards: list[Board]) -> None:
    assert not boards[1].has(["late"])
    threading.Timer(0.1, boards[2].put, ("late", b"!")).start()
    assert boards[1].get("late", 20) == b"!"
    with pytest.raises(BoardTimeout, match=r"gave up waiting for never after 0\.1 s"):
        boards[1].get("never", 0.1)


@pytest.mark.parametrize("boards", [20], indirect=True)
def test_much_is_passed_on_by_all_ranks_at_the_same_time(boards: list[Board]) -> None:
    def write_and_read(rank: int, board: Board) -> bool:
        board.put(f"of {rank}", bytes([rank]) * 300_000)
        return all(board.get(f"of {other}", 60) == bytes([other]) * 300_000 for other in range(len(boards)))

    assert all(answer.result() for answer in on_all(boards, write_and_read))


@pytest.mark.parametrize("boards", [12], indirect=True)
def test_all_ranks_see_what_one_writes_in_the_same_order(boards: list[Board]) -> None:
    def write(rank: int, board: Board) -> None:
        for number in range(rank, 400, 4):
            boards[5].put("last", b"%d" % number)
            boards[5].put("longer", b"%d" % number * 1000)

    for written in on_all(boards[:4], write):  # four threads
        written.result()
    boards[5].put("behind it", b"")
    for board in boards:
        board.wait(["behind it"], 20)
    assert len({board.get("last", 0) for board in boards}) == 1
    assert len({board.get("longer", 0) for board in boards}) == 1


@pytest.mark.parametrize("boards", [1, 4, 11], indirect=True)
def test_ranks_that_count_at_the_same_time_miss_nothing(boards: list[Board]) -> None:
    def count(rank: int, board: Board) -> list[int]:
        return [board.add("number", 1, 20) for _ in range(50)]

    counted = [number for answer in on_all(boards, count) for number in answer.result()]
    assert sorted(counted) == list(range(1, 50 * len(boards) + 1))
    assert {board.add("number", 0, 20) for board in boards} == {50 * len(boards)}
    for board in boards:
        board.wait(["number"], 20)


@pytest.mark.parametrize("boards", [11], indirect=True)
def test_a_rank_that_counted_has_the_sum_itself(boards: list[Board]) -> None:
    def count(rank: int, board: Board) -> bool:
        sums = [(board.add(f"of {rank}", 1, 20), int(board.get(f"of {rank}", 0))) for _ in range(50)]
        return sums == [(number, number) for number in range(1, 51)]

    assert all(answer.result() for answer in on_all(boards, count))


def test_what_is_deleted_is_gone_for_all(boards: list[Board]) -> None:
    boards[1].put("note", b"1")
    boards[2].wait(["note"], 20)
    assert boards[2].delete("note")
    assert not boards[2].delete("note")
    boards[2].put("behind it", b"")
    boards[1].wait(["behind it"], 20)
    assert not boards[1].has(["note"])


@pytest.mark.parametrize("leaver", [0, 2])
def test_who_waits_for_a_rank_that_went_away_is_told_and_what_was_written_can_still_be_read(
    boards: list[Board], leaver: int
) -> None:
    boards[leaver].put("before", b"1")
    boards[1].wait(["before"], 20)
    boards[leaver].close()
    with pytest.raises(MeshBroken, match=r"rank [02] is gone: it has left, or has lost another rank"):
        boards[1].get("never", 20)
    assert boards[1].get("before", 20) == b"1"


@pytest.mark.parametrize("boards", [12], indirect=True)
@pytest.mark.parametrize("lost", [0, 7])
def test_ranks_that_are_not_connected_to_a_lost_one_learn_of_it_too(boards: list[Board], lost: int) -> None:
    boards[lost].close()
    far = set(range(12)) - neighbors(lost, 12)
    assert len(far) > 3
    for rank in far - {lost}:
        with pytest.raises(MeshBroken, match="gave up waiting for never"):
            boards[rank].get("never", 60)
        with pytest.raises(MeshBroken, match="ended"):
            boards[rank].put("more", b"")


def test_waiting_ends_at_once_when_it_is_interrupted_from_another_thread(boards: list[Board]) -> None:
    threading.Timer(0.1, boards[1].interrupt).start()
    for waits in (boards[1], boards[2]):
        with pytest.raises(MeshBroken, match="gave up waiting for never"):
            waits.get("never", 60)
    with pytest.raises(MeshBroken, match=r"the connection to rank [02] ended"):
        boards[1].put("more", b"")


def test_closing_twice_is_harmless_and_leaves_no_thread() -> None:
    boards = boards_of(2)
    for board in [*boards, *boards]:
        board.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "raysgd-board"]
