"""Ranks that tell each other something, as threads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from raysgd.backends._guests import MeetingFailed, Patience
from raysgd.backends._meeting import Meeting
from raysgd.engine.types import Rendezvous
from tests.backends.test_guests import HERE, Switch


@pytest.fixture
def host() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.close()


def at(port: int) -> Rendezvous:
    return Rendezvous(HERE, port, on_one_node=True)


def test_everybody_hears_what_all_said_in_the_order_of_ranks(host: Meeting) -> None:
    place, meetings = at(host.open()), [host, Meeting(), Meeting()]
    with ThreadPoolExecutor(3) as pool:
        heard = [
            pool.submit(meeting.exchange, place, rank, 3, f"I am {rank}", Patience(20))
            for rank, meeting in enumerate(meetings)
        ]
        assert [one.result() for one in heard] == [["I am 0", "I am 1", "I am 2"]] * 3


def test_the_place_is_closed_when_all_have_been_there(host: Meeting) -> None:
    place = at(host.open())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Meeting().exchange, place, 1, 2, "b", Patience(20))
        host.exchange(place, 0, 2, "a", Patience(20))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, place.port))


def test_a_rank_of_another_group_is_not_told_anything(host: Meeting) -> None:
    place = at(host.open())
    with ThreadPoolExecutor(2) as pool:
        heard = pool.submit(host.exchange, place, 0, 2, "a", Patience(20))
        stranger = pool.submit(Meeting().exchange, at(place.port), 1, 2, "x", Patience(20))
        assert isinstance(stranger.exception(), MeetingFailed)
        assert Meeting().exchange(place, 1, 2, "b", Patience(20)) == ["a", "b"] == heard.result()


def test_who_waits_for_others_can_be_interrupted(host: Meeting) -> None:
    place, switch = at(host.open()), Switch()
    switch.flip_in(0.2)
    with ThreadPoolExecutor(1) as pool:
        guest = pool.submit(Meeting().exchange, place, 1, 3, "b", Patience(20))
        with pytest.raises(MeetingFailed, match="another rank failed"):
            host.exchange(place, 0, 3, "a", Patience(20, switch))
        with pytest.raises(MeetingFailed, match="another rank left"):
            guest.result()


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(MeetingFailed, match=f"could not meet the others at {HERE}:{port}: .*ECONNREFUSED"):
        Meeting().exchange(at(port), 1, 2, "b", Patience(5))


def test_others_that_do_not_come_are_waited_for_so_long(host: Meeting) -> None:
    place = at(host.open())
    with pytest.raises(MeetingFailed, match="took too long"):
        host.exchange(place, 0, 2, "a", Patience(0.1))
