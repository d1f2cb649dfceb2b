"""Who is let in, and for how long one waits."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from raysgd.backends._guests import MeetingFailed, Patience, Reception, call_on, expect, receive, send

HERE = "127.0.0.1"
SECRET = secrets.token_bytes(16)


class Switch:
    """Says whether it was flipped."""

    def __init__(self) -> None:
        self._is_on = threading.Event()

    def __call__(self) -> bool:
        return self._is_on.is_set()

    def flip_in(self, seconds: float) -> None:
        threading.Timer(seconds, self._is_on.set).start()


@pytest.fixture
def reception() -> Iterator[Reception]:
    found = Reception(HERE)
    yield found
    found.close()


@pytest.fixture
def hole() -> Iterator[int]:
    """A port at which nobody answers: what waits there to be let in are all that may."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((HERE, 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        yield listener.getsockname()[1]


def calls(port: int, secret: bytes = SECRET, rank: int = 1, number: int = 0) -> socket.socket:
    return call_on(HERE, port, secret, rank, number, Patience(20))


def test_guests_say_who_they_are_and_can_be_talked_to(reception: Reception) -> None:
    with ExitStack() as stack:
        callers = [stack.enter_context(calls(reception.port, rank=rank, number=10 + rank)) for rank in (1, 2)]
        guests = list(expect(reception, SECRET, 2, Patience(20)))
        assert sorted((guest.rank, guest.number) for guest in guests) == [(1, 11), (2, 12)]
        for guest in guests:
            stack.enter_context(guest.connection)
            send(guest.connection, bytes([guest.rank]) * 3, Patience(20))
        assert [receive(caller, 3, Patience(20)) for caller in callers] == [b"\1\1\1", b"\2\2\2"]


def test_who_expects_nobody_does_not_wait(reception: Reception) -> None:
    assert list(expect(reception, SECRET, 0, Patience(0.0))) == []


def test_strangers_are_sent_away_and_hold_nobody_up(reception: Reception) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((HERE, reception.port))) for _ in range(4)]
        for stranger, words in zip(strangers, (b"", b"GET / HTTP/1.0\r\n\r\n", b"x" * 24, b"silent"), strict=True):
            stranger.sendall(words)
        for stranger in strangers[:2]:
            stranger.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        caller = stack.enter_context(calls(reception.port))
        [guest] = expect(reception, SECRET, 1, Patience(20))
        stack.enter_context(guest.connection)
        assert time.monotonic() - began < 5
        send(guest.connection, b"!", Patience(20))
        assert receive(caller, 1, Patience(20)) == b"!"
        for stranger in strangers:
            stranger.settimeout(20)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "it hears nothing, and is sent away when all are there"


def test_a_rank_of_another_group_is_a_stranger(reception: Reception) -> None:
    with calls(reception.port, secret=secrets.token_bytes(16)), pytest.raises(MeetingFailed, match="took too long"):
        list(expect(reception, SECRET, 1, Patience(0.3)))


@pytest.mark.parametrize("stranger_says", [None, b"", b"half a greeting"])
def test_waiting_for_guests_ends_at_once_when_it_is_interrupted(
    reception: Reception, stranger_says: bytes | None
) -> None:
    switch = Switch()
    switch.flip_in(0.2)
    began = time.monotonic()
    with ExitStack() as stack:
        if stranger_says is not None:
            stack.enter_context(socket.create_connection((HERE, reception.port))).sendall(stranger_says)
        with pytest.raises(MeetingFailed, match="another rank failed"):
            list(expect(reception, SECRET, 1, Patience(60, switch)))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_calling_on_a_host_that_does_not_answer_ends_in_time(hole: int, is_interrupted: bool) -> None:
    switch = Switch()
    patience = Patience(60 if is_interrupted else 0.3, switch)
    if is_interrupted:
        switch.flip_in(0.3)
    began = time.monotonic()
    with pytest.raises(MeetingFailed):
        call_on(HERE, hole, SECRET, 1, 0, patience)
    assert time.monotonic() - began < 5


def test_calling_on_nobody_says_why() -> None:
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match="ECONNREFUSED"):
        calls(port)


def test_much_can_be_said_and_one_that_leaves_is_noticed(reception: Reception) -> None:
    content = secrets.token_bytes(2**22)
    with ThreadPoolExecutor(1) as pool, calls(reception.port) as caller:
        [guest] = expect(reception, SECRET, 1, Patience(20))
        with guest.connection:
            sent = pool.submit(send, guest.connection, content, Patience(20))
            assert receive(caller, len(content), Patience(20)) == content
            sent.result()
        with pytest.raises(MeetingFailed, match="left before the group was formed"):
            receive(caller, 1, Patience(20))
