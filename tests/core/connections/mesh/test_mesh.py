"""Ranks that swap bytes, as threads."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator

import pytest

from raysgd.core.connections.mesh.meeting import ConnectFailed, Endpoint
from raysgd.core.connections.mesh.mesh import Mesh, MeshBroken
from tests.core.connections.ranks import Deadline, connect_to, meshes_of, met, on_all
from tests.helpers.fakes import meeting

HERE = "127.0.0.1"
LARGE = 8 * 2**20  # more than any buffer of a socket holds
SOON_S = 30.0  # less than a rank waits for another one, though a busy machine may stand still for seconds


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Mesh]]:
    """Three ranks, or as many as asked for."""
    with meshes_of(getattr(request, "param", 3)) as meshes:
        yield meshes


def everything_to_everybody(rank: int, mesh: Mesh, length: int, size: int) -> dict[int, bytes]:
    """What each other rank sent, which is its number, `length` times."""
    others = [other for other in range(size) if other != rank]
    rooms = {other: bytearray(length) for other in others}
    mesh.swap(
        dict.fromkeys(others, memoryview(bytes([rank]) * length)),
        {other: memoryview(room) for other, room in rooms.items()},
    )
    return {other: bytes(room) for other, room in rooms.items()}


@pytest.mark.parametrize("ranks", [2, 3, 5], indirect=True)
@pytest.mark.parametrize("length", [0, 1, 1000, LARGE])
def test_everybody_gets_what_the_others_send(ranks: list[Mesh], length: int) -> None:
    size = len(ranks)
    for _ in range(2):
        answers = on_all(ranks, lambda rank, mesh: everything_to_everybody(rank, mesh, length, size))
        for rank, answer in enumerate(answers):
            assert answer.result() == {other: bytes([other]) * length for other in range(size) if other != rank}


def test_a_rank_may_send_without_receiving_and_the_other_way_round(ranks: list[Mesh]) -> None:
    content = secrets.token_bytes(LARGE)
    room = bytearray(LARGE)

    def one_way(rank: int, mesh: Mesh) -> None:
        if rank == 2:
            mesh.swap({0: memoryview(content)}, {})
        elif rank == 0:
            mesh.swap({}, {2: memoryview(room)})

    for answer in on_all(ranks, one_way):
        answer.result()
    assert room == content


def test_lanes_do_not_disturb_each_other() -> None:
    _, lanes = met([[{1}] * 2, [{0}] * 2])
    (one, other), (one_there, other_there) = ([Mesh(lane, 60) for lane in of_rank] for of_rank in lanes)
    one.swap({1: memoryview(b"first")}, {})
    other.swap({1: memoryview(b"second")}, {})
    heard = bytearray(6)
    other_there.swap({}, {0: memoryview(heard)})
    assert heard == b"second"
    one_there.swap({}, {0: memoryview(heard)[:5]})
    assert heard[:5] == b"first"
    for mesh in (one, other, one_there, other_there):
        mesh.close_sockets()


def test_a_lane_leads_only_where_it_should() -> None:
    leads = [[{1, 2}, {1}], [{0}, {0, 2}], [{0}, {1}]]
    _, found = met(leads)
    assert [[set(lane) for lane in lanes] for lanes in found] == leads
    for lane in (lane for lanes in found for lane in lanes):
        for connection in lane.values():
            connection.close()


def test_ranks_at_different_exchanges_are_told_so_and_nobody_hangs(ranks: list[Mesh]) -> None:
    lengths = [10, 10, 20]
    answers = on_all(ranks, lambda rank, mesh: everything_to_everybody(rank, mesh, lengths[rank], 3))
    errors = [answer.exception() for answer in answers]
    assert all(isinstance(error, ValueError | MeshBroken) for error in errors)
    told = [str(error) for error in errors if isinstance(error, ValueError)]
    assert told
    assert all("not at the same exchange" in text for text in told)


def test_who_waits_for_a_rank_that_went_away_is_told_and_goes_on_being_told(ranks: list[Mesh]) -> None:
    ranks[2].close_sockets()
    for _ in range(3):
        answers = on_all(ranks[:2], lambda rank, mesh: everything_to_everybody(rank, mesh, LARGE, 3))
        assert [type(answer.exception()) for answer in answers] == [MeshBroken, MeshBroken]


def test_a_rank_that_is_gone_is_noticed_before_anything_is_exchanged(ranks: list[Mesh]) -> None:
    assert not any(rank.is_broken for rank in ranks)
    ranks[1].close_sockets()
    deadline = time.monotonic() + 20
    while not all(rank.is_broken for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(rank.is_broken for rank in ranks)


def test_a_rank_that_does_not_come_is_waited_for_and_named() -> None:
    with (
        meshes_of(2, timeout_s=0.2) as (alone, _),
        pytest.raises(MeshBroken, match=r"rank 1 did not answer within 0\.2 s"),
    ):
        everything_to_everybody(0, alone, 10, 2)


def test_a_swap_can_be_ended_from_another_thread(ranks: list[Mesh]) -> None:
    threading.Timer(0.2, ranks[0].interrupt).start()
    began = time.monotonic()
    answers = on_all(ranks[:2], lambda rank, mesh: everything_to_everybody(rank, mesh, 10, 3))
    assert [type(answer.exception()) for answer in answers] == [MeshBroken, MeshBroken]
    assert time.monotonic() - began < SOON_S


def test_sending_to_a_rank_that_ended_its_connections_is_noticed_though_nothing_is_expected_from_it() -> None:
    with meshes_of(2) as (sender, other):
        threading.Timer(0.2, other.interrupt).start()  # the socket stays open, as it does until the rank leaves
        began = time.monotonic()
        with pytest.raises(MeshBroken):
            sender.swap({1: memoryview(bytes(4 * LARGE))}, {})
        assert time.monotonic() - began < SOON_S


def test_bytes_of_another_kind_are_not_taken_for_those_that_are_expected(ranks: list[Mesh]) -> None:
    content, room = memoryview(b"12345678"), memoryview(bytearray(8))
    ranks[1].swap({0: content}, {}, kind=2)
    with pytest.raises(ValueError, match="8 bytes of another kind where this rank expects 8: the ranks are not at"):
        ranks[0].swap({}, {1: room}, kind=3)


def test_a_swap_may_wait_for_longer_than_a_system_call_can() -> None:
    with meshes_of(2, timeout_s=1e9) as (one, other):
        threading.Timer(0.2, one.swap, ({1: memoryview(b"late")}, {})).start()
        heard = bytearray(4)
        other.swap({}, {0: memoryview(heard)})
        assert heard == b"late"


def test_a_rank_that_is_gone_already_is_said_to_be() -> None:
    gone, endpoint = Endpoint(HERE), Endpoint(HERE)
    place = meeting(gone.port, endpoint.port)
    gone.close_sockets()
    with pytest.raises(ConnectFailed, match="rank 1 could not connect"):
        endpoint.connect(place, 1, [{0}], Deadline(5))


def test_others_that_nobody_hears_of_are_waited_for_no_longer_than_that() -> None:
    endpoint = Endpoint(HERE)
    with pytest.raises(ConnectFailed, match="was too slow"):
        endpoint.connect(meeting(endpoint.port, 1), 0, [{1}], Deadline(0.2))


def test_nobody_listens_any_more_once_all_are_connected() -> None:
    place, found = met([[{1}], [{0}]])
    for address in place.addresses:
        with pytest.raises(ConnectionRefusedError):
            connect_to(address)
    for [lane] in found:
        for connection in lane.values():
            connection.close()
