"""Messages between ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from raysgd.connections.mesh.links import Links, PeerMessage, Received, RoutedMessage, taken_from
from raysgd.connections.mesh.mesh import MeshBroken
from raysgd.connections.mesh.routes import neighbors

MESSAGES = [
    PeerMessage(1, "key", b"first", 7),
    PeerMessage(0, "", b""),
    PeerMessage(2, "\N{SNOWMAN}", b"x" * 300_000),
]


def test_letters_are_taken_when_they_are_complete() -> None:
    letters = [RoutedMessage.of(5, message) for message in MESSAGES] + [RoutedMessage.of(6, MESSAGES[0], 3)]
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
        rank.links.close()


def test_a_rank_receives_what_another_sends_and_learns_that_it_left() -> None:
    near, far = pair()
    ranks = [End(0, 2, {1: near}), End(1, 2, {0: far})]
    for message in MESSAGES:
        ranks[0].links.send_to_all(message)
    ranks[1].wait(lambda: len(ranks[1].received) == len(MESSAGES))
    assert ranks[1].received == [(0, message) for message in MESSAGES]
    ranks[0].links.close()
    ranks[1].wait(lambda: bool(ranks[1].reasons))
    assert ranks[1].reasons[0].startswith("rank 0 is gone")
    with pytest.raises(MeshBroken, match="the connection to rank 1 ended"):
        ranks[0].links.send(1, MESSAGES[0])
    ranks[1].links.close()


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
    sender.links.close()
    receiver.links.close()


def test_sending_more_behind_what_is_left_fails_once_the_connections_were_cut() -> None:
    near, far = pair()
    sender = End(0, 2, {1: near})
    for message in MESSAGES * 50:
        sender.links.send_to_all(message)
    sender.links.interrupt()
    assert sender.reasons[0] == "it was interrupted"
    with pytest.raises(MeshBroken, match="the connection to rank 1 ended"):
        sender.links.send_to_all(MESSAGES[0])
    sender.links.close()
    far.close()


@pytest.mark.parametrize(
    "says",
    [
        RoutedMessage.of(1, MESSAGES[0], 7).encoded,  # for a rank that there is not
        RoutedMessage.of(1, MESSAGES[0]).encoded.replace(b"key", b"\xff\xff\xff"),
        RoutedMessage.of(1, MESSAGES[0]).encoded[:-1],  # and no more
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
    rank.links.close()
    for end in (far, also_far):
        end.close()
