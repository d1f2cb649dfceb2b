"""What ranks write on a board, all of which read it."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from raysgd.core.connections.mesh.board import (
    Board,
    BoardMessage,
    BoardTimeout,
    neighbors,
    next_of_all,
    others,
    taken_from,
)
from raysgd.core.connections.mesh.mesh import MeshBroken
from raysgd.core.connections.mesh.store import BoardStore
from tests.core.connections.ranks import boards_of, on_all

LARGE = 2**22  # more than any buffer of a socket holds


@pytest.fixture
def boards(request: pytest.FixtureRequest) -> Iterator[list[Board]]:
    """Three ranks, or as many as asked for."""
    with boards_of(getattr(request, "param", 3)) as found:
        yield found


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


def test_a_value_that_was_taken_takes_no_more_memory_on_its_rank(boards: list[Board]) -> None:
    boards[1].put("word", b"first")
    assert boards[0].take("word", 20) == b"first"
    assert not boards[0].has(["word"])
    assert boards[2].get("word", 20) == b"first"
    with pytest.raises(BoardTimeout):
        boards[0].take("word", 0.0)


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


@pytest.mark.parametrize("leaver", [0, 2])
def test_who_waits_for_a_rank_that_went_away_is_told_and_what_was_written_can_still_be_read(
    boards: list[Board], leaver: int
) -> None:
    boards[leaver].put("before", b"1")
    boards[1].wait(["before"], 20)
    boards[leaver].close_sockets()
    with pytest.raises(MeshBroken, match=r"rank [02] is gone: it has left, or has lost another rank"):
        boards[1].get("never", 20)
    assert boards[1].get("before", 20) == b"1"


@pytest.mark.parametrize("boards", [12], indirect=True)
@pytest.mark.parametrize("lost", [0, 7])
def test_ranks_that_are_not_connected_to_a_lost_one_learn_of_it_too(boards: list[Board], lost: int) -> None:
    boards[lost].close_sockets()
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
    with boards_of(2) as boards:
        for board in boards:
            board.close_sockets()
    assert not [thread for thread in threading.enumerate() if thread.name == "raysgd-board"]


def test_pytorch_finds_a_store_with_all_that_process_groups_ask_of_one(boards: list[Board]) -> None:
    kept = [BoardStore(board) for board in boards]
    stores = [dist.PrefixStore("part", store) for store in kept]  # type: ignore[attr-defined]
    stores[0].set("word", "text")
    assert stores[1].get("word") == b"text"
    stores[2].multi_set(["number", "other"], ["6", "7"])
    for store in stores:  # a word comes to each rank in its own time
        store.wait(["word", "number"], datetime.timedelta(seconds=20))
    assert stores[2].check(["word"])
    assert not stores[2].check(["word", "another"])
    assert stores[0].multi_get(["word", "number"]) == [b"text", b"6"]
    with pytest.raises(Exception, match=r"has no counters. Create groups without `use_local_synchronization=True`"):
        stores[0].add("number", 1)


def test_a_store_says_as_pytorch_does_that_nobody_wrote_in_time(boards: list[Board]) -> None:
    store, bounded = BoardStore(boards[0]), BoardStore(boards[0], longest_wait_s=0.1)
    store.set_timeout(datetime.timedelta(seconds=0.1))
    bounded.set_timeout(datetime.timedelta(seconds=1800))
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.get("never")
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.wait(["never"], datetime.timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match=r"gave up waiting .* after 0\.1 s"):
        bounded.get("never")


MESSAGES = [BoardMessage(1, "key", b"first"), BoardMessage(0, "", b""), BoardMessage(2, "\N{SNOWMAN}", b"x" * 300_000)]


def test_messages_are_taken_when_they_are_complete() -> None:
    sent, received, taken = b"".join(message.encoded for message in MESSAGES), bytearray(), []
    for start in range(0, len(sent), 777):
        received += sent[start : start + 777]
        taken += taken_from(received)
    assert taken == MESSAGES
    assert not received


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_sending_waits_for_no_rank_and_what_is_left_is_sent_later() -> None:
    near, far = pair()
    sender = Board(0, 2, {1: near})
    for number in range(50):  # 15 MB, more than the connection takes
        sender.put(str(number), b"x" * 300_000)
    receiver = Board(1, 2, {0: far})
    receiver.wait(list(map(str, range(50))), 20)
    assert receiver.values == [b"x" * 300_000] * 50
    sender.close_sockets()
    receiver.close_sockets()


def test_sending_more_behind_what_is_left_fails_once_the_connections_were_cut() -> None:
    near, far = pair()
    sender = Board(0, 2, {1: near})
    for number in range(50):
        sender.put(str(number), b"x" * 300_000)
    sender.interrupt()
    with pytest.raises(MeshBroken, match="gave up waiting for never: it was interrupted"):
        sender.get("never", 20)
    with pytest.raises(MeshBroken, match="the connection to rank 1 ended"):
        sender.put("more", b"")
    sender.close_sockets()
    far.close()


@pytest.mark.parametrize(
    "says", [MESSAGES[0].encoded.replace(b"key", b"\xff\xff\xff"), MESSAGES[0].encoded[:-1]], ids=["no text", "cut off"]
)
def test_what_no_rank_sends_ends_all_connections(says: bytes) -> None:
    (near, far), (also_near, also_far) = pair(), pair()
    board = Board(0, 3, {1: near, 2: also_near})
    far.sendall(says)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(MeshBroken):
        board.get("never", 20)
    assert also_far.recv(1) == b""
    assert not board.values
    board.close_sockets()
    for end in (far, also_far):
        end.close()


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


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_reaches_each_rank_once(size: int) -> None:
    for source in range(size):
        ways = ways_of_all(source, size)
        assert sorted(ways) == list(range(size))
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
