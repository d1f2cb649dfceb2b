"""What ranks write on a board, all of which read it."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from raysgd.connections.mesh.board import (
    Board,
    BoardTimeout,
    Links,
    PeerMessage,
    Received,
    RoutedMessage,
    neighbors,
    next_of_all,
    next_of_one,
    others,
    taken_from,
)
from raysgd.connections.mesh.meeting import Deadline, Endpoint
from raysgd.connections.mesh.mesh import MeshBroken
from raysgd.connections.mesh.store import BoardStore
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
        board.close_sockets()


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
    boards = boards_of(2)
    for board in [*boards, *boards]:
        board.close_sockets()
    assert not [thread for thread in threading.enumerate() if thread.name == "raysgd-board"]


def test_pytorch_finds_a_store_with_all_that_process_groups_ask_of_one(boards: list[Board]) -> None:
    kept = [BoardStore(board) for board in boards]
    stores = [dist.PrefixStore("part", store) for store in kept]  # type: ignore[attr-defined]
    stores[0].set("word", "text")
    assert stores[1].get("word") == b"text"
    assert [store.add("number", 2) for store in stores] == [2, 4, 6]
    stores[2].wait(["word", "number"], datetime.timedelta(seconds=20))
    assert stores[2].check(["word"])
    assert not stores[2].check(["word", "other"])
    assert stores[0].multi_get(["word", "number"]) == [b"text", b"6"]
    assert {store.num_keys() for store in (stores[0], kept[0])} == {2}
    assert stores[0].delete_key("word")


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


MESSAGES = [
    PeerMessage(1, "key", b"first", 7),
    PeerMessage(0, "", b""),
    PeerMessage(2, "\N{SNOWMAN}", b"x" * 300_000),
]


def test_letters_are_taken_when_they_are_complete() -> None:
    letters = [RoutedMessage.from_rank(5, message) for message in MESSAGES]
    letters.append(RoutedMessage.from_rank(6, MESSAGES[0], 3))
    sent, received, taken = b"".join(letter.encoded for letter in letters), bytearray(), []
    for start in range(0, len(sent), 777):
        received += sent[start : start + 777]
        taken += taken_from(received)
    assert taken == letters
    assert not received
    assert [letter.message for letter in taken] == [*MESSAGES, MESSAGES[0]]


class End:
    """One rank: what it receives, and why it ended."""

    def __init__(self, rank: int, size: int, connections: dict[int, socket.socket]) -> None:
        self.received: list[tuple[int, PeerMessage]] = []
        self.reasons: list[str] = []
        self.changed = threading.Condition()
        self.links = Links(rank, size, connections, self.take, self.end)
        self.links.start()

    def take(self, messages: Received) -> None:
        with self.changed:
            self.received += messages
            self.changed.notify_all()

    def end(self, reason: str) -> None:
        with self.changed:
            self.reasons.append(reason)
            self.changed.notify_all()

    def wait(self, is_done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(is_done, 20)


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def ring() -> Iterator[list[End]]:
    """Nine ranks, each with a connection to its neighbors only: not to the one three places on."""
    size, ends = 9, {}
    for rank in range(size):
        for other in neighbors(rank, size):
            if rank < other:
                ends[rank, other], ends[other, rank] = pair()
    ranks = [End(rank, size, {b: end for (a, b), end in ends.items() if a == rank}) for rank in range(size)]
    yield ranks
    for rank in ranks:
        rank.links.close_sockets()


def test_a_rank_receives_what_another_sends_and_learns_that_it_left() -> None:
    near, far = pair()
    ranks = [End(0, 2, {1: near}), End(1, 2, {0: far})]
    for message in MESSAGES:
        ranks[0].links.send_to_all(message)
    ranks[1].wait(lambda: len(ranks[1].received) == len(MESSAGES))
    assert ranks[1].received == [(0, message) for message in MESSAGES]
    ranks[0].links.close_sockets()
    ranks[1].wait(lambda: bool(ranks[1].reasons))
    assert ranks[1].reasons[0].startswith("rank 0 is gone")
    with pytest.raises(MeshBroken, match="the connection to rank 1 ended"):
        ranks[0].links.send(1, MESSAGES[0])
    ranks[1].links.close_sockets()


def test_messages_to_one_and_to_all_come_in_the_order_in_which_they_were_sent(ring: list[End]) -> None:
    far = [0, *range(2, 9)]
    for number in range(100):
        ring[1].links.send_to_all(PeerMessage(0, str(number), bytes(number * 100)))
        for rank in far:
            ring[1].links.send(rank, PeerMessage(1, str(number)))
    for rank in far:
        ring[rank].wait(lambda rank=rank: len(ring[rank].received) == 200)
        assert [(each.kind, each.key) for _, each in ring[rank].received] == [
            (kind, str(number)) for number in range(100) for kind in (0, 1)
        ]
        assert {source for source, _ in ring[rank].received} == {1}
    assert not ring[1].received


def test_sending_waits_for_no_rank_and_what_is_left_is_sent_later() -> None:
    near, far = pair()
    sender = End(0, 2, {1: near})
    for message in MESSAGES * 50:  # 15 MB, more than the connection takes
        sender.links.send_to_all(message)
    receiver = End(1, 2, {0: far})
    receiver.wait(lambda: len(receiver.received) == 50 * len(MESSAGES))
    assert [message for _, message in receiver.received] == MESSAGES * 50
    sender.links.close_sockets()
    receiver.links.close_sockets()


def test_sending_more_behind_what_is_left_fails_once_the_connections_were_cut() -> None:
    near, far = pair()
    sender = End(0, 2, {1: near})
    for message in MESSAGES * 50:
        sender.links.send_to_all(message)
    sender.links.interrupt()
    assert sender.reasons[0] == "it was interrupted"
    with pytest.raises(MeshBroken, match="the connection to rank 1 ended"):
        sender.links.send_to_all(MESSAGES[0])
    sender.links.close_sockets()
    far.close()


@pytest.mark.parametrize(
    "says",
    [
        RoutedMessage.from_rank(1, MESSAGES[0], 7).encoded,  # for a rank that there is not
        RoutedMessage.from_rank(1, MESSAGES[0]).encoded.replace(b"key", b"\xff\xff\xff"),
        RoutedMessage.from_rank(1, MESSAGES[0]).encoded[:-1],  # and no more
    ],
)
def test_what_no_rank_sends_ends_all_connections(says: bytes) -> None:
    (near, far), (also_near, also_far) = pair(), pair()
    rank = End(0, 3, {1: near, 2: also_near})
    far.sendall(says)
    far.shutdown(socket.SHUT_WR)
    rank.wait(lambda: bool(rank.reasons))
    assert also_far.recv(1) == b""
    assert not rank.received
    rank.links.close_sockets()
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
