"""Connections from each rank to every other, over which bytes are swapped. Needs nothing but sockets.

Every rank has to make the same swaps in the same order. What a swap finds wrong ends all connections of this rank, so
that no other rank waits for it; so does `interrupt`, from any thread.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol, TypeAlias

from raysgd.engine.types import Rendezvous

_POLL_S = 0.05
_GREETING_S = 10.0
_TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sII")  # the token of the group, the rank that speaks, the lane
_LENGTH = struct.Struct("<Q")

_IS_GONE = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere it is seen once the connection is used

Bytes: TypeAlias = memoryview
Invitation: TypeAlias = tuple[str, int, str]
"""Host, port and a token; also as a list, which is what JSON makes of it."""


class MeshBroken(ConnectionError):
    """A connection to another rank ended, could not be made, or kept this rank waiting for too long."""


def host_of(rendezvous: Rendezvous) -> str:
    """Under which address the other ranks find this one; on a single node that is the loopback address."""
    if rendezvous.on_one_node:
        return rendezvous.address
    import ray

    return str(ray.util.get_node_ip_address())


class Door:
    """Where a rank listens for others that are about to connect; `connect` makes the meshes, one for each lane.

    Args:
        rendezvous: Where the ranks meet: on one node nobody from outside needs to come in.
        timeout_s: How long to wait for another rank, here and in every swap.

    Attributes:
        invitation: What to tell the others, all of which need the invitations of all.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        host = host_of(rendezvous)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host if rendezvous.on_one_node else "", 0), family=family, backlog=512)
        self._listener.settimeout(_POLL_S)
        self._is_interrupted = False
        self.invitation: Invitation = (host, self._listener.getsockname()[1], secrets.token_hex(_TOKEN_BYTES))

    def interrupt(self) -> None:
        """From another thread: ends the wait for others."""
        self._is_interrupted = True

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def connect(self, rank: int, invitations: Sequence[Invitation], num_lanes: int) -> list[Mesh]:
        """Connects to all ranks, which must all do so at this time; each lane is a mesh of its own.

        Args:
            rank: Who this is.
            invitations: Those of all ranks, by rank.
            num_lanes: How many meshes to make.

        Raises:
            MeshBroken: Another rank is gone, or did not come in time.
        """
        lanes: list[dict[int, socket.socket]] = [{} for _ in range(num_lanes)]
        token = bytes.fromhex(invitations[0][2])  # known to the ranks of this group, and to nobody else
        deadline = time.monotonic() + self._timeout_s
        with ExitStack() as undo:
            try:
                for peer, (host, port, _) in enumerate(invitations[:rank]):
                    for lane, connections in enumerate(lanes):
                        connections[peer] = undo.enter_context(socket.create_connection((host, port), self._timeout_s))
                        connections[peer].sendall(_GREETING.pack(token, rank, lane))
                for _ in range((len(invitations) - 1 - rank) * num_lanes):
                    peer, lane, connection = self._await_guest(token, deadline)
                    lanes[lane][peer] = undo.enter_context(connection)
            except OSError as error:
                if isinstance(error, MeshBroken):
                    raise
                raise MeshBroken(f"rank {rank} could not connect to the others: {error}") from error
            undo.pop_all()
        return [Mesh(connections, self._timeout_s) for connections in lanes]

    def _await_guest(self, token: bytes, deadline: float) -> tuple[int, int, socket.socket]:
        while True:
            if self._is_interrupted or time.monotonic() > deadline:
                raise MeshBroken("another rank failed, or took too long, before it had connected")
            try:
                guest, _ = self._listener.accept()
            except TimeoutError:
                continue
            said, peer, lane = _GREETING.unpack(_greeting_of(guest))
            if said == token:
                return peer, lane, guest
            guest.close()  # it came by mistake


def _greeting_of(guest: socket.socket) -> bytes:
    """What a guest says first; zeros where it is too short."""
    guest.settimeout(_GREETING_S)
    greeting = b""
    try:
        while len(greeting) < _GREETING.size:
            part = guest.recv(_GREETING.size - len(greeting))
            if not part:
                break
            greeting += part
    except OSError:
        pass
    return greeting.ljust(_GREETING.size, b"\0")


class Mesh:
    """The connections of one rank, of one lane.

    Args:
        connections: The socket to each other rank.
        timeout_s: How long a swap waits for something to arrive or to be taken.
    """

    def __init__(self, connections: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._connections = dict(connections)
        self._timeout_s = timeout_s
        self._is_broken = False
        for connection in self._connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def swap(self, outgoing: Mapping[int, Bytes], incoming: Mapping[int, Bytes]) -> None:
        """Sends bytes to some ranks and receives from some, all at the same time.

        Args:
            outgoing: What to send, by rank.
            incoming: Where to put what comes, by rank; as long as what that rank sends.

        Raises:
            MeshBroken: A connection ended, or nothing moved for too long.
            ValueError: A rank sends another number of bytes: it is not at the same exchange.
        """
        try:
            if self._is_broken:
                raise MeshBroken("the connections to the other ranks have ended")
            self._move(
                {rank: _Sending(self._connections[rank], view) for rank, view in outgoing.items()},
                {rank: _Receiving(self._connections[rank], rank, view) for rank, view in incoming.items()},
            )
        except BaseException as error:
            self.interrupt()
            if isinstance(error, OSError) and not isinstance(error, MeshBroken):
                raise MeshBroken(f"the connection to another rank ended: {error}") from error
            raise

    def _move(self, sending: dict[int, _Task], receiving: dict[int, _Task]) -> None:
        while True:
            has_moved = False
            for tasks in (sending, receiving):
                for rank, task in list(tasks.items()):
                    has_moved |= task.go_on()
                    if task.is_done:
                        del tasks[rank]
            if not sending and not receiving:
                return
            if not has_moved:
                self._wait(sending, receiving)

    def _wait(self, sending: Mapping[int, _Task], receiving: Mapping[int, _Task]) -> None:
        poll, awaited = select.poll(), {*sending, *receiving}
        for rank, connection in self._connections.items():
            events = (select.POLLOUT if rank in sending else 0) | (select.POLLIN if rank in receiving else 0)
            if connection.fileno() < 0:
                raise MeshBroken("the connections to the other ranks were closed")
            poll.register(connection, events or _IS_GONE)
        ready = {number for number, _ in poll.poll(self._timeout_s * 1000)}
        if not ready:
            raise MeshBroken(f"waited {self._timeout_s:g} s in vain for rank {', '.join(map(str, sorted(awaited)))}")
        if not any(self._connections[rank].fileno() in ready for rank in awaited):
            # Whoever is gone will not be there for the next swap, and those that wait for it may wait in vain.
            raise MeshBroken("another rank has ended its connection")

    @property
    def is_broken(self) -> bool:
        """Whether the connections have ended, as far as this rank has noticed."""
        return self._is_broken

    def interrupt(self) -> None:
        """From any thread: ends all connections, and with them the swaps of this rank and of those that wait for it."""
        self._is_broken = True
        for connection in self._connections.values():
            with suppress(OSError):  # ended already
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connections and gives their sockets back."""
        self.interrupt()
        for connection in self._connections.values():
            connection.close()


class _Task(Protocol):
    """One message on its way."""

    is_done: bool

    def go_on(self) -> bool:
        """Moves what can be moved now; returns whether that was anything."""


class _Sending:
    """A message on its way out: its length, then its bytes."""

    __slots__ = ("_connection", "_parts", "is_done")

    def __init__(self, connection: socket.socket, view: Bytes) -> None:
        self._connection = connection
        self._parts: list[Any] = [_LENGTH.pack(len(view)), view]
        self.is_done = False

    def go_on(self) -> bool:
        try:
            num_sent = self._connection.sendmsg(self._parts)
        except BlockingIOError:
            return False
        self._parts = list(_rest_of(self._parts, num_sent))
        self.is_done = not self._parts
        return True


class _Receiving:
    """A message on its way in."""

    __slots__ = ("_connection", "_head", "_rank", "_view", "is_done")

    def __init__(self, connection: socket.socket, rank: int, view: Bytes) -> None:
        self._connection, self._rank, self._view = connection, rank, view
        self._head: bytes | None = b""
        self.is_done = False

    def go_on(self) -> bool:
        try:
            return self._receive_head() if self._head is not None else self._receive_body()
        except BlockingIOError:
            return False

    def _receive_head(self) -> bool:
        assert self._head is not None
        self._head += self._nonempty(self._connection.recv(_LENGTH.size - len(self._head)))
        if len(self._head) == _LENGTH.size:
            (length,) = _LENGTH.unpack(self._head)
            if length != len(self._view):
                raise ValueError(
                    f"rank {self._rank} sends {length} bytes where this rank expects {len(self._view)}: the ranks are "
                    "not at the same exchange. All of them have to average the same gradients in the same order."
                )
            self._head = None
            self.is_done = not length
        return True

    def _receive_body(self) -> bool:
        num_received = self._nonempty(self._connection.recv_into(self._view))
        self._view = self._view[num_received:]
        self.is_done = not len(self._view)
        return True

    def _nonempty(self, received: Any) -> Any:
        if not received:
            raise MeshBroken(f"rank {self._rank} is gone: it has ended its connection")
        return received


def _rest_of(parts: Sequence[Any], num_sent: int) -> Iterator[Any]:
    """What is left of a message after its first bytes were sent."""
    for part in parts:
        if num_sent < len(part):
            yield memoryview(part)[num_sent:]
        num_sent = max(0, num_sent - len(part))
