"""Ranks that tell each other something, as threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raysgd.backends._meeting import Meeting, MeetingFailed

HERE = "127.0.0.1"


@pytest.fixture
def host() -> Iterator[Meeting]:
    meeting = Meeting(timeout_s=20)
    yield meeting
    meeting.close()


def test_everybody_hears_what_all_said_in_the_order_of_ranks(host: Meeting) -> None:
    port = host.open()
    meetings = [host, Meeting(20), Meeting(20)]
    with ThreadPoolExecutor(3) as pool:
        heard = [
            pool.submit(meeting.exchange, HERE, port, rank, 3, f"I am {rank}") for rank, meeting in enumerate(meetings)
        ]
        assert [one.result() for one in heard] == [["I am 0", "I am 1", "I am 2"]] * 3


def test_a_stranger_at_the_door_does_no_harm(host: Meeting) -> None:
    port = host.open()
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(host.exchange, HERE, port, 0, 2, "a")
        for greeting in (b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b""):
            with socket.create_connection((HERE, port)) as stranger:
                stranger.sendall(greeting)
        assert Meeting(20).exchange(HERE, port, 1, 2, "b") == ["a", "b"] == heard.result()


def test_who_waits_for_others_can_be_interrupted(host: Meeting) -> None:
    port = host.open()
    threading.Timer(0.2, host.interrupt).start()
    with ThreadPoolExecutor(1) as pool:
        guest = pool.submit(Meeting(20).exchange, HERE, port, 1, 3, "b")
        with pytest.raises(MeetingFailed, match="another rank failed"):
            host.exchange(HERE, port, 0, 3, "a")
        with pytest.raises(MeetingFailed, match="rank 0 left"):
            guest.result()


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(MeetingFailed, match=f"could not meet the others at {HERE}:{port}"):
        Meeting(5).exchange(HERE, port, 1, 2, "b")


def test_others_that_do_not_come_are_waited_for_so_long() -> None:
    meeting = Meeting(timeout_s=0.1)
    port = meeting.open()
    with pytest.raises(MeetingFailed, match="took too long"):
        meeting.exchange(HERE, port, 0, 2, "a")
    meeting.close()
