"""Gloo's connections: where ranks listen is read from what gloo writes, and what leads there is found and ended."""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from raysgd.connections._gloo import DelayedCalls, GlooConnections, addresses_in, as_written
from raysgd.connections.mesh.board import Board
from tests.connections.mesh.test_board import boards_of

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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="calls the C library")
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


class Rank:
    """Listens as gloo does, and has two connections between ranks and one of its own."""

    def __init__(self, stack: ExitStack, board: Board) -> None:
        listener, other = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        pairs = [self._connect(stack, each) for each in (listener, listener, other)]
        self.of_gloo, self.own = pairs[:2], pairs[2]
        self.gloo = GlooConnections(board)
        self.address = as_written("{}:{}".format(*listener.getsockname()))

    @staticmethod
    def _connect(stack: ExitStack, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        near = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=20))
        far = stack.enter_context(listener.accept()[0])
        far.settimeout(20)
        return near, far

    @property
    def numbers_of_gloo(self) -> set[int]:
        return {end.fileno() for pair in self.of_gloo for end in pair}


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    found = boards_of(2)
    yield found
    for board in found:
        board.close()


@pytest.fixture
def rank(boards: list[Board]) -> Iterator[Rank]:
    with ExitStack() as stack:
        made = Rank(stack, boards[0])
        boards[1].put("0", b"whatever stands before" + made.address + b"and behind")
        boards[0].wait(["0"], 20)
        yield made


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_connections_to_where_ranks_listen_are_found(rank: Rank) -> None:
    assert rank.gloo.found is None, "no group has formed"
    rank.gloo.look()
    assert rank.gloo.found is not None
    assert {each.number for each in rank.gloo.found} == rank.numbers_of_gloo


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_those_of_groups_that_come_later_are_left_out(rank: Rank, boards: list[Board]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        near, far = Rank._connect(stack, listener)
        rank.gloo.look()
        boards[0].put("of the user", as_written("{}:{}".format(*listener.getsockname())))
        assert {each.number for each in rank.gloo.found or ()} == rank.numbers_of_gloo
        rank.gloo.look()
        assert {near.fileno(), far.fileno()} < {each.number for each in rank.gloo.found or ()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("has_formed", [False, True])
def test_they_are_ended_and_no_others(rank: Rank, has_formed: bool) -> None:
    if has_formed:
        rank.gloo.look()
    rank.gloo.end()
    assert [far.recv(1) for _, far in rank.of_gloo] == [b"", b""]
    near, far = rank.own
    near.sendall(b"x")
    assert far.recv(1) == b"x"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_that_was_found_and_is_gone_is_noticed(rank: Rank) -> None:
    assert rank.gloo.are_open, "none was looked for"
    rank.gloo.look()
    assert rank.gloo.are_open
    rank.of_gloo[1][0].close()
    assert not rank.gloo.are_open


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_was_found_is_ended_though_another_connection_leads_there_now(rank: Rank) -> None:
    rank.gloo.look()
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        near, far = Rank._connect(stack, listener)
        rank.gloo._board.put("later", as_written("{}:{}".format(*listener.getsockname())))
        rank.gloo.end()
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
