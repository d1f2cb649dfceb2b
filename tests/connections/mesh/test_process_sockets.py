"""Finding and cutting the connections of this process."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from raysgd.connections.mesh import process_sockets
from raysgd.connections.mesh.process_sockets import OpenedSockets, OpenSocket, between_ranks, open_sockets, opened_since

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class Sockets:
    """Real connections over the loopback interface."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.listener = self.own(socket.create_server(("127.0.0.1", 0)))

    def own(self, made: socket.socket) -> socket.socket:
        return self._stack.enter_context(made)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        near = self.own(socket.create_connection(self.listener.getsockname()))
        far = self.own(self.listener.accept()[0])
        return near, far


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
    local = sockets._stack.enter_context(socket.socket(socket.AF_UNIX))
    found = opened_since(before).connections
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
        assert number in {one.number for one in opened_since(before).connections}
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
            found = opened_since(before).connections
            [of_near], [of_far] = found_of(near, found), found_of(far, found)
            assert of_near.ends == (of_far.ends[1], of_far.ends[0])


def test_of_all_connections_those_are_kept_that_lead_to_where_a_rank_listens() -> None:
    mine = [OpenSocket(5, 5, ("h:1", "h:2")), OpenSocket(6, 6, ("h:3", "h:4")), OpenSocket(7, 7, ("h:5", "h:6"))]
    assert between_ranks(mine, {"h:2", "h:3", "h:9"}) == mine[:2]
    assert between_ranks(mine, set()) == []


def test_sockets_that_listen_are_found_where_they_came_since(sockets: Sockets) -> None:
    before = open_sockets()
    ends = sockets.connect()
    listener = sockets.own(socket.create_server(("127.0.0.1", 0)))
    sockets.own(socket.socket(socket.AF_UNIX))
    address, found = text(listener.getsockname()), opened_since(before).listening
    assert address in found
    assert not {text(sockets.listener.getsockname()), *(text(end.getsockname()) for end in ends)} & set(found)
    assert address not in opened_since(open_sockets()).listening


def test_a_cut_ends_a_wait_on_either_side_at_once(sockets: Sockets) -> None:
    before = open_sockets()
    near, far = sockets.connect()
    received: list[bytes] = []
    waiting = [
        threading.Thread(target=lambda end=end: received.append(end.recv(1)), daemon=True) for end in (near, far)
    ]
    for thread in waiting:
        thread.start()
    [one] = found_of(near, opened_since(before).connections)
    one.shut()
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive(), "it still waits"
    assert received == [b"", b""]


def test_a_cut_leaves_the_number_to_whoever_owns_it(sockets: Sockets) -> None:
    before = open_sockets()
    near, _ = sockets.connect()
    [one] = found_of(near, opened_since(before).connections)
    one.shut()
    one.shut()
    near.close()  # fails if somebody else had closed it
    one.shut()


def test_a_number_that_was_given_to_another_socket_is_not_cut(sockets: Sockets) -> None:
    before = open_sockets()
    near, _ = sockets.connect()
    [one] = found_of(near, opened_since(before).connections)
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
    monkeypatch.setattr(process_sockets, "_FOLDER", "/no/such/folder")
    assert open_sockets() == {}
    assert opened_since({}) == OpenedSockets([], [])
