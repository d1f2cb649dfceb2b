"""Gloo's connections: where ranks listen is read from what gloo writes, and what leads there is found and ended."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from raysgd.core.connections import _gloo
from raysgd.core.connections._gloo import (
    DelayedCalls,
    GlooConnections,
    OpenSocket,
    addresses_in,
    as_written,
    open_sockets,
    opened_since,
)
from raysgd.core.connections.mesh.board import Board
from tests.core.connections.ranks import boards_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

ADDRESSES = ["127.0.0.1:80", "10.0.0.255:65535", "::1:29500", "fe80::1%2:258"]


def host_of(address: str) -> str:
    return address.rpartition(":")[0]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_found_wherever_it_stands_in_a_value(address: str) -> None:
    written, hosts = as_written(address), {host_of(address)}
    for value in (written, b"\x02\x00" + written + bytes(20), b"....." * 3 + written):
        assert addresses_in([b"other", value], hosts) == {address}
    other = f"{host_of(address)}:4660"
    assert addresses_in([written + b"!" + as_written(other)], hosts) == {address, other}


def test_only_addresses_with_one_of_the_hosts_are_found() -> None:
    values = [b"".join(map(as_written, ADDRESSES))]
    assert addresses_in(values, {"127.0.0.1", "::1"}) == {ADDRESSES[0], ADDRESSES[2]}
    assert addresses_in(values, set()) == set()
    assert addresses_in([b"", as_written(ADDRESSES[0])[1:]], {"127.0.0.1"}) == set(), "cut off: there is no port"


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_an_address_is_written_as_c_has_it(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no such interface")
        raw, length = ctypes.create_string_buffer(128), ctypes.c_uint(128)
        assert ctypes.CDLL(None).getsockname(listener.fileno(), raw, ctypes.byref(length)) == 0
        address = f"{host}:{listener.getsockname()[1]}"
        assert as_written(address) in raw.raw
        assert addresses_in([raw.raw], {host}) == {address}


def connect(stack: ExitStack, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """A connection to it over the loopback interface, from both ends."""
    near = stack.enter_context(socket.create_connection(listener.getsockname()))
    return near, stack.enter_context(listener.accept()[0])


class Rank:
    """Listens as gloo does, and has two connections between ranks and one of its own."""

    def __init__(self, stack: ExitStack, board: Board) -> None:
        listener, other = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        pairs = [connect(stack, each) for each in (listener, listener, other)]
        for _, far in pairs:
            far.settimeout(20)
        self.of_gloo, self.own = pairs[:2], pairs[2]
        self.gloo = GlooConnections(board)
        self.address = as_written("{}:{}".format(*listener.getsockname()))

    @property
    def numbers_of_gloo(self) -> set[int]:
        return {end.fileno() for pair in self.of_gloo for end in pair}


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    with boards_of(2) as found:
        yield found


@pytest.fixture
def rank(boards: list[Board]) -> Iterator[Rank]:
    with ExitStack() as stack:
        made = Rank(stack, boards[0])
        boards[1].put("0", b"whatever stands before" + made.address + b"and behind")
        boards[0].wait(["0"], 20)
        yield made


def test_connections_to_where_ranks_listen_are_found(rank: Rank) -> None:
    assert rank.gloo.found is None, "no group has formed"
    rank.gloo.look()
    assert rank.gloo.found is not None
    assert {each.number for each in rank.gloo.found} == rank.numbers_of_gloo


def test_those_of_groups_that_come_later_are_left_out(rank: Rank, boards: list[Board]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        near, far = connect(stack, listener)
        rank.gloo.look()
        boards[0].put("of the user", as_written("{}:{}".format(*listener.getsockname())))
        assert {each.number for each in rank.gloo.found or ()} == rank.numbers_of_gloo
        rank.gloo.look()
        assert {near.fileno(), far.fileno()} < {each.number for each in rank.gloo.found or ()}


@pytest.mark.parametrize("has_formed", [False, True])
def test_they_are_ended_and_no_others(rank: Rank, has_formed: bool) -> None:
    if has_formed:
        rank.gloo.look()
    rank.gloo.cut()
    assert [far.recv(1) for _, far in rank.of_gloo] == [b"", b""]
    near, far = rank.own
    near.sendall(b"x")
    assert far.recv(1) == b"x"


def test_one_that_was_found_and_is_gone_is_noticed(rank: Rank) -> None:
    assert rank.gloo.are_open, "none was looked for"
    rank.gloo.look()
    assert rank.gloo.are_open
    rank.of_gloo[1][0].close()
    assert not rank.gloo.are_open


def test_what_was_found_is_ended_though_another_connection_leads_there_now(rank: Rank) -> None:
    rank.gloo.look()
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        near, far = connect(stack, listener)
        rank.gloo._board.put("later", as_written("{}:{}".format(*listener.getsockname())))
        rank.gloo.cut()
        near.sendall(b"x")
        assert far.recv(1) == b"x"


def test_things_are_done_later_in_their_order_or_at_once() -> None:
    done: list[str] = []
    first_done = threading.Event()

    def first() -> None:
        done.append("first")
        first_done.set()

    later = DelayedCalls(first, lambda: done.append("second"))
    assert not done
    assert not later.has_ended
    assert first_done.wait(20), "without being hurried"
    later.hurry()
    later.hurry()
    assert done == ["first", "second"]
    assert later.has_ended


class Sockets:
    """Real connections over the loopback interface."""

    def __init__(self, stack: ExitStack) -> None:
        self.own = stack.enter_context
        self.listener = self.own(socket.create_server(("127.0.0.1", 0)))
        self.connect = lambda: connect(stack, self.listener)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with ExitStack() as stack:
        yield Sockets(stack)


def text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def found_of(connection: socket.socket, found: list[OpenSocket]) -> list[OpenSocket]:
    return [one for one in found if one.number == connection.fileno()]


def test_only_connections_that_came_since_are_found_with_both_ends(sockets: Sockets) -> None:
    old = sockets.connect()
    before = open_sockets()
    near, far = sockets.connect()
    server = sockets.own(socket.create_server(("127.0.0.1", 0)))  # it listens: there is no other end
    local = sockets.own(socket.socket(socket.AF_UNIX))
    found = opened_since(before)[0]
    ours = {one.fileno() for one in (*old, near, far, server, local)}  # a library may have connections of its own
    assert ours & {one.number for one in found} == {near.fileno(), far.fileno()}
    [one] = found_of(near, found)
    assert one.ends == (text(near.getsockname()), text(near.getpeername()))


def test_a_number_that_was_used_before_is_found_when_it_is_another_socket(sockets: Sockets) -> None:
    old, _ = sockets.connect()
    number = old.fileno()
    before = open_sockets()
    new, _ = sockets.connect()
    old.close()
    os.dup2(new.fileno(), number)
    try:
        assert number in {one.number for one in opened_since(before)[0]}
    finally:
        os.close(number)


def test_looking_leaves_blocking_sockets_as_they_are(sockets: Sockets) -> None:
    near, far = sockets.connect()
    pair = [sockets.own(each) for each in socket.socketpair()]
    socket.setdefaulttimeout(30)
    try:
        opened_since({})
    finally:
        socket.setdefaulttimeout(None)
    assert all(os.get_blocking(each.fileno()) for each in (near, far, *pair))


def test_an_address_is_told_alike_by_sockets_of_either_kind() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::", 0))
        listener.listen()
        before = open_sockets()
        with (
            socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as near,
            listener.accept()[0] as far,
        ):
            found = opened_since(before)[0]
            [of_near], [of_far] = found_of(near, found), found_of(far, found)
            assert of_near.ends == (of_far.ends[1], of_far.ends[0])


def test_sockets_that_listen_are_found_where_they_came_since(sockets: Sockets) -> None:
    before = open_sockets()
    ends = sockets.connect()
    listener = sockets.own(socket.create_server(("127.0.0.1", 0)))
    sockets.own(socket.socket(socket.AF_UNIX))
    address, found = text(listener.getsockname()), opened_since(before)[1]
    assert address in found
    assert not {text(sockets.listener.getsockname()), *(text(end.getsockname()) for end in ends)} & set(found)
    assert address not in opened_since(open_sockets())[1]


def test_a_cut_leaves_the_number_to_whoever_owns_it(sockets: Sockets) -> None:
    before = open_sockets()
    near, _ = sockets.connect()
    [one] = found_of(near, opened_since(before)[0])
    one.shut()
    one.shut()
    near.close()  # fails if somebody else had closed it
    one.shut()


def test_a_number_that_was_given_to_another_socket_is_not_cut(sockets: Sockets) -> None:
    before = open_sockets()
    near, _ = sockets.connect()
    [one] = found_of(near, opened_since(before)[0])
    other, far = sockets.connect()
    near.close()
    os.dup2(other.fileno(), one.number)
    try:
        one.shut()
        far.sendall(b"x")
        assert other.recv(1) == b"x"
    finally:
        os.close(one.number)


def test_where_there_is_nothing_to_read_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gloo, "_FOLDER", "/no/such/folder")
    assert open_sockets() == {}
    assert opened_since({}) == ([], [])
