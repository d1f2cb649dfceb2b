"""Messages between ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from raysgd.connections._links import Links, Message
from raysgd.connections._mesh import MeshBroken

MESSAGES = [Message(1, "key", b"first", b"second", 7), Message(0, "", b""), Message(2, "\N{SNOWMAN}", b"x" * 300_000)]


def test_messages_are_taken_one_by_one_when_they_are_complete() -> None:
    sent, received, taken = b"".join(message.encoded() for message in MESSAGES), bytearray(), []
    for start in range(0, len(sent), 777):
        received += sent[start : start + 777]
        while (message := Message.taken_from(received)) is not None:
            taken.append(message)
    assert taken == MESSAGES
    assert not received


class End:
    """One rank: what it receives, and why it ended."""

    def __init__(self, other: int, connection: socket.socket) -> None:
        self.received: list[tuple[int, Message]] = []
        self.reasons: list[str] = []
        self.changed = threading.Condition()
        self.links = Links({other: connection}, lambda *message: self.note(self.received, message), self.end)
        self.links.start()

    def note(self, notes: list[tuple[int, Message]], message: tuple[int, Message]) -> None:
        with self.changed:
            notes.append(message)
            self.changed.notify_all()

    def end(self, reason: str) -> None:
        with self.changed:
            self.reasons.append(reason)
            self.changed.notify_all()

    def wait(self, is_done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(is_done, 20)


def test_a_rank_receives_what_another_sends_and_learns_that_it_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    ranks = [End(1, near), End(0, far)]
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
