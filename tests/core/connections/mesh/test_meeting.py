"""Which processes are connected, and how long a rank waits for them."""

from __future__ import annotations

import errno
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest

from raysgd.core.connections.mesh import meeting
from raysgd.core.connections.mesh.meeting import (
    Address,
    ConnectFailed,
    Endpoint,
    Handshake,
    initiate,
    listen_at,
    proof_of,
    respond,
)
from raysgd.core.engine.shared.types import LOOPBACK, Rendezvous
from tests.core.connections.ranks import Deadline, connect_to

HERE = LOOPBACK
HOSTS = [LOOPBACK, "127.0.0.2"]  # where ranks listen under a name, and where at a port
SECRET = secrets.token_bytes(32)
HELLO = struct.pack("<II16s32s", 1, 0, b"n" * 16, b"g" * 32)
NOWHERE = ("", 0)
SOON_S = 25.0  # a busy machine may stand still for seconds


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Rank:
    """One that connects to others, in a thread of its own.

    Args:
        stack: Closes what it opens.
        number: Who it is.
        secret: What it knows.
        host: Where it listens.
    """

    def __init__(self, stack: ExitStack, number: int, secret: bytes = SECRET, host: str = HERE) -> None:
        self.number, self.secret = number, secret
        self.listener = Endpoint(host)
        self._host, self._stack = host, stack
        stack.callback(self.listener.close_sockets)

    @property
    def address(self) -> Address:
        return self._host, self.listener.port

    def lanes(self, hosts: list[Rank], num_peers: int, num_lanes: int, deadline: Deadline) -> list[tuple[int, int]]:
        """Which ranks are connected, on which lane."""
        lane = {host.number: host.address for host in hosts}
        lane |= dict.fromkeys(range(self.number + 1, self.number + 1 + num_peers), NOWHERE)
        return self.connect(lane, num_lanes, deadline)

    def connect(self, lane: dict[int, Address], num_lanes: int, deadline: Deadline) -> list[tuple[int, int]]:
        addresses = tuple(lane.get(rank, NOWHERE) for rank in range(max(lane, default=0) + 1))
        place = Rendezvous(addresses, True, self.secret)
        found = self.listener.connect(place, self.number, [lane] * num_lanes, deadline)
        for one in found:
            for connection in one.values():
                self._stack.enter_context(connection)
        return sorted((rank, number) for number, one in enumerate(found) for rank in one)


def at_once(*doings: Callable[[], Any]) -> list[Any]:
    """What each returns, or the exception that it raises."""
    with ThreadPoolExecutor(len(doings)) as pool:
        futures = [pool.submit(doing) for doing in doings]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("host", HOSTS)
def test_every_rank_connects_to_every_other_on_every_lane(
    stack: ExitStack, host: str, size: int, num_lanes: int
) -> None:
    ranks = [Rank(stack, number, host=host) for number in range(size)]
    met = at_once(
        *(
            lambda rank=rank: rank.lanes(ranks[: rank.number], size - 1 - rank.number, num_lanes, Deadline(20))
            for rank in ranks
        )
    )
    for number, found in enumerate(met):
        assert found == [(other, lane) for other in range(size) if other != number for lane in range(num_lanes)]


def test_who_expects_nobody_does_not_wait(stack: ExitStack) -> None:
    assert Rank(stack, 0).lanes([], 0, 1, Deadline(0.0)) == []


@pytest.mark.parametrize("where", HOSTS)
def test_strangers_are_refused_and_delay_no_one(stack: ExitStack, where: str) -> None:
    host, peer = Rank(stack, 0, host=where), Rank(stack, 1, host=where)
    strangers = [stack.enter_context(connect_to(host.address)) for _ in range(5)]
    says = (b"", b"GET / HTTP/1.0\r\n\r\n", HELLO + b"x" * 32, HELLO, b"silent")
    for stranger, words in zip(strangers, says, strict=True):
        stranger.sendall(words)
    for stranger in strangers[:2]:
        stranger.shutdown(socket.SHUT_WR)
    began = time.monotonic()
    met = at_once(lambda: host.lanes([], 1, 1, Deadline(60)), lambda: peer.lanes([host], 0, 1, Deadline(60)))
    assert met == [[(1, 0)], [(0, 0)]]
    assert time.monotonic() - began < SOON_S
    for stranger in strangers:
        stranger.settimeout(20)
        with suppress(ConnectionResetError):
            assert SECRET not in heard_by(stranger), "it is disconnected when all are there"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there are no names")
def test_who_connects_while_too_many_wait_to_be_accepted_tries_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_BACKLOG", 1)
    host, peers = Rank(stack, 0), [Rank(stack, number) for number in range(1, 12)]
    have_called: set[int] = set()

    def accept_when_all_have_called() -> list[tuple[int, int]]:
        while len(have_called) < len(peers):
            time.sleep(0.01)
        return host.lanes([], len(peers), 1, Deadline(60))

    def connect(peer: Rank) -> list[tuple[int, int]]:
        return peer.lanes([host], 0, 1, Deadline(60, lambda: have_called.add(peer.number) is not None))

    accepted, *connected = at_once(accept_when_all_have_called, *(partial(connect, peer) for peer in peers))
    assert accepted == [(number, 0) for number in range(1, 12)]
    assert connected == [[(0, 0)]] * 11


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there are no names")
def test_at_the_loopback_address_nothing_listens_at_the_port_and_nothing_else_gets_it(stack: ExitStack) -> None:
    rank = Rank(stack, 0)
    address = HERE, rank.address[1] & 0xFFFF
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    rank.listener.close_sockets()
    with socket.socket() as other:
        other.bind(address)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there are no names")
def test_a_name_tells_nothing_of_the_next_one(stack: ExitStack) -> None:
    one, other = (Rank(stack, number).listener.port >> 16 for number in range(2))
    assert min(one, other).bit_length() > 96, "random, so that no one takes it before"
    assert one != other


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there are no names")
def test_where_a_name_cannot_be_had_ranks_meet_over_tcp(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = stack.enter_context(socket.socket(socket.AF_UNIX))
    taken.bind(b"\0raysgd/tests/" + secrets.token_bytes(8))
    with monkeypatch.context() as patched:
        patched.setattr(meeting, "_name_of", lambda address: taken.getsockname())
        host = Rank(stack, 0)
    peer = Rank(stack, 1)
    assert host.listener.port < 2**16 <= peer.listener.port
    met = at_once(lambda: host.lanes([], 1, 1, Deadline(60)), lambda: peer.lanes([host], 0, 1, Deadline(60)))
    assert met == [[(1, 0)], [(0, 0)]]


@pytest.mark.parametrize("where", HOSTS)
def test_of_many_strangers_only_the_latest_stay_connected(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(meeting, "_MOST_STRANGERS", 2)
    host, peer = Rank(stack, 0, host=where), Rank(stack, 1, host=where)
    strangers = [stack.enter_context(connect_to(host.address)) for _ in range(20)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host.lanes, [], 1, 1, Deadline(60))
        for stranger in strangers[:17]:
            assert heard_by(stranger) == b"", "it is disconnected while the rank still waits"
        assert not waiting.done()
        assert peer.lanes([host], 0, 1, Deadline(60)) == [(0, 0)]
        assert waiting.result() == [(1, 0)]


@pytest.mark.parametrize("where", HOSTS)
def test_strangers_do_not_crowd_out_a_rank(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(meeting, "_MOST_STRANGERS", 2)
    host = Rank(stack, 0, host=where)
    rank = stack.enter_context(connect_to(host.address))
    handshake = initiate(rank, SECRET, 1, 0, 0)
    rank.setblocking(False)
    next(handshake)  # there is no answer yet
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host.lanes, [], 1, 1, Deadline(60))
        select.select([rank], [], [], 20)  # the host has its greeting
        strangers = [stack.enter_context(connect_to(host.address)) for _ in range(20)]
        for stranger in strangers[:17]:
            assert heard_by(stranger) == b""
        for _ in handshake:
            time.sleep(0.01)
        assert waiting.result() == [(1, 0)]


@pytest.mark.parametrize("where", HOSTS)
def test_a_rank_that_strangers_have_crowded_out_tries_again(stack: ExitStack, where: str) -> None:
    host, peer = Rank(stack, 0, host=where), Rank(stack, 1, host=where)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peer.lanes, [host], 0, 1, Deadline(60))
        select.select([host.listener._listener], [], [], 20)
        host.listener._listener.accept()[0].close()
        assert host.lanes([], 1, 1, Deadline(60)) == [(1, 0)]
        assert waiting.result() == [(0, 0)]


def heard_by(stranger: socket.socket) -> bytes:
    heard = b""
    while part := stranger.recv(1000):
        heard += part
    return heard


def test_a_rank_of_another_group_is_a_stranger_to_both_sides(stack: ExitStack) -> None:
    host, peer, is_refused = Rank(stack, 0), Rank(stack, 1, secrets.token_bytes(32)), threading.Event()

    def try_to_join() -> None:
        try:
            peer.lanes([host], 0, 1, Deadline(60))
        finally:
            is_refused.set()

    failed = at_once(lambda: host.lanes([], 1, 1, Deadline(60, is_refused.is_set)), try_to_join)
    assert [type(error) for error in failed] == [ConnectFailed, ConnectFailed]
    assert "was too slow" in str(failed[0])
    assert "the process that listens in place of rank 0 does not belong to the group" in str(failed[1])


def test_who_listens_in_place_of_a_rank_learns_nothing_that_would_let_it_in(stack: ExitStack) -> None:
    impostor = stack.enter_context(socket.create_server((HOSTS[1], 0)))
    peer, heard = Rank(stack, 1), bytearray()

    def pretend() -> None:
        with impostor.accept()[0] as connection:
            hello = connection.recv(len(HELLO))
            connection.sendall(bytes(16) + bytes(32))
            heard.extend(hello + heard_by(connection))

    address = impostor.getsockname()
    failed, _ = at_once(lambda: peer.connect({0: address}, 1, Deadline(20)), pretend)
    assert isinstance(failed, ConnectFailed)
    assert len(heard) == len(HELLO), "only who it says it is, a number that it drew, and what a rank can say of these"
    assert SECRET not in heard


@pytest.mark.parametrize("stranger_says", [None, b"", b"half a hello", HELLO])
@pytest.mark.parametrize("where", HOSTS)
def test_waiting_for_peers_ends_at_once_when_it_is_interrupted(
    stack: ExitStack, where: str, stranger_says: bytes | None
) -> None:
    switch, host = threading.Event(), Rank(stack, 0, host=where)
    began = time.monotonic()
    threading.Timer(0.2, switch.set).start()
    if stranger_says is not None:
        stack.enter_context(connect_to(host.address)).sendall(stranger_says)
    with pytest.raises(ConnectFailed, match="another rank failed"):
        host.lanes([], 1, 1, Deadline(60, switch.is_set))
    assert time.monotonic() - began < SOON_S


@pytest.fixture
def hole(stack: ExitStack) -> Address:
    """Where nobody answers: what waits there to be let in are all that may."""
    listener = stack.enter_context(socket.socket())
    listener.bind((HOSTS[1], 0))
    listener.listen(0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        with suppress(BlockingIOError):
            waiting.connect(listener.getsockname())
    address: Address = listener.getsockname()
    return address


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_connecting_to_a_host_that_does_not_answer_ends_in_time(
    stack: ExitStack, hole: Address, is_interrupted: bool
) -> None:
    switch = threading.Event()
    deadline = Deadline(60 if is_interrupted else 0.3, switch.is_set)
    if is_interrupted:
        threading.Timer(0.3, switch.set).start()
    began = time.monotonic()
    with pytest.raises(ConnectFailed):
        Rank(stack, 1).connect({0: hole}, 1, deadline)
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("host", HOSTS)
def test_connecting_where_no_one_listens_says_why(stack: ExitStack, host: str) -> None:
    closed = stack.enter_context(socket.socket())
    closed.bind((host, 0))  # and does not listen; nobody else can
    with pytest.raises(ConnectFailed, match=r"could not connect to the others: .*Connection refused"):
        Rank(stack, 1).connect({0: closed.getsockname()}, 1, Deadline(20))


def test_one_listens_under_the_address_that_is_asked_for_and_no_other(stack: ExitStack) -> None:
    listeners = [stack.enter_context(listen_at("127.0.0.2")) for _ in range(3)]
    addresses = [listener.getsockname() for listener in listeners]
    assert {host for host, _ in addresses} == {"127.0.0.2"}
    refused = [socket.socket().connect_ex((HERE, port)) == errno.ECONNREFUSED for _, port in addresses]
    assert any(refused), "another program may have one of the ports"


def test_where_others_know_a_machine_by_an_address_that_it_does_not_have_it_listens_at_all(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    listener = stack.enter_context(listen_at("192.0.2.123"))
    stack.enter_context(socket.create_connection((HERE, listener.getsockname()[1])))
    assert "does not have the address 192.0.2.123" in caplog.text


def test_a_proof_cannot_be_used_between_other_ranks_or_in_the_other_role() -> None:
    nonces = secrets.token_bytes(32)
    proofs = {
        proof_of(SECRET, role, initiator, responder, lane, nonces)
        for role in (b"responder", b"initiator")
        for initiator, responder in ((1, 0), (0, 1), (1, 2))
        for lane in (0, 1)
    }
    assert len(proofs) == 12
    assert proof_of(SECRET, b"responder", 1, 0, 0, nonces) != proof_of(SECRET, b"responder", 1, 0, 0, bytes(32))


def both(initiates: Handshake, responds: Handshake) -> list[tuple[int, int]]:
    """Lets both sides take turns until both are done."""
    done: list[tuple[int, int]] = []
    sides = [initiates, responds]
    while sides:
        for side in list(sides):
            try:
                next(side)
            except StopIteration as end:
                sides.remove(side)
                done.append(end.value)
    return done


@pytest.mark.parametrize("knows", [True, False])
def test_both_know_each_other_afterwards_or_neither(knows: bool) -> None:
    with ExitStack() as stack:
        near, far = (stack.enter_context(end) for end in socket.socketpair())
        near.setblocking(False)
        far.setblocking(False)
        other = SECRET if knows else bytes(32)
        sides = initiate(near, SECRET, 2, 4, lane=1), respond(far, other, 4, lambda: None)
        if not knows:
            with pytest.raises(ConnectFailed, match="in place of rank 4 does not belong to the group"):
                both(*sides)
            return
        assert both(*sides) == [(4, 1), (2, 1)]
