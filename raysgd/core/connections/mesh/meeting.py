"""Connects a group's ranks: each rank listens, connects to lower ranks, and accepts connections from higher ranks.

Any process that reaches a rank's port may connect to it. The driver therefore creates a secret for each group and sends
it to the ranks through Ray. In a handshake, each side of a connection proves that it knows the secret, with an HMAC
over a fresh nonce from the other side. The connection never carries the secret itself. A process that does not belong
to the group is disconnected and cannot delay the ranks.

ADR 55 explains why ranks meet through Ray and not through a store.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from raysgd.core.connections.mesh.board import Board
from raysgd.core.connections.mesh.mesh import Mesh
from raysgd.core.engine.shared.interface import FORM_TIMEOUT_S, Connection
from raysgd.core.engine.shared.types import LOOPBACK, PORT_BITS, Rendezvous, World
from raysgd.exceptions import OnFailure

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_BACKLOG = 4096
# Limit of unauthenticated connections besides the expected ones. More could exhaust this process's file descriptors.
_MOST_STRANGERS = 128
_MOST_ACCEPTED = 256  # limit of connections to accept per poll, so that earlier handshakes also make progress
_HAS_NAMES = sys.platform.startswith("linux")  # Linux has abstract Unix sockets, whose names need no files

Address: TypeAlias = tuple[str, int]
"""Numeric host address and port.

A port number above 65535 stands for a Unix socket. It consists of random bits, followed by the TCP port that is
reserved for the socket.
"""

Connections: TypeAlias = dict[int, socket.socket]
"""The sockets of one lane, by rank. A lane is a set of connections, at most one per rank. Two ranks may share several
lanes, for different purposes."""
_NONCE_LENGTH = 16
_PROOF_LENGTH = 32


def listen_at(host: str) -> socket.socket:
    """Return a socket that listens at a free port of the address `host`.

    If this machine does not have that address, the socket listens at all addresses of the machine. This happens behind
    network address translation (NAT), where other machines know this machine by an address that it does not have
    itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    logger.warning(
        "this machine does not have the address %s, by which others know it: listening on all of its addresses", host
    )
    return socket.create_server(("", 0), family=family, backlog=_BACKLOG)


class Endpoint:
    """The sockets at which a rank listens for connections from other ranks.

    At the loopback address, the endpoint listens at a Unix socket, because messages over TCP take three times as long.
    It also reserves a TCP port, because environment variables such as `MASTER_PORT` need a port number. If Unix sockets
    are not possible, the endpoint listens at a TCP port.

    Attributes:
        port: The number with which other ranks connect: the second item of an `Address`.
    """

    def __init__(self, host: str) -> None:
        self._holding: socket.socket | None = None
        named = _listen_at_name(host) if has_names(host) else None
        if named is not None:
            self._holding, self._listener, self.port = named
        else:
            self._listener = listen_at(host)
            self.port = int(self._listener.getsockname()[1])
        self._listener.setblocking(False)

    def close_sockets(self) -> None:
        """Close the listening sockets."""
        self._listener.close()
        if self._holding is not None:
            self._holding.close()

    def connect(
        self, rendezvous: Rendezvous, rank: int, lanes: Sequence[Collection[int]], check: Callable[[], None]
    ) -> list[Connections]:
        """Connect this rank to other ranks, then stop listening.

        The other ranks must call this method at the same time. This rank connects to lower ranks and accepts
        connections from higher ranks.

        Args:
            rendezvous: The ranks' addresses and the group's secret.
            rank: This rank.
            lanes: For each set of connections (lane) to open, the ranks to connect to. Each of those ranks must list
                this rank in the same lane.
            check: Called regularly during the wait. May raise.

        Returns:
            For each lane, the connected sockets by rank.

        Raises:
            ConnectFailed: Another rank is gone or cannot be reached.
        """
        try:
            return _Meeting(rendezvous, rank, lanes, self._listener).connect(check)
        finally:
            self.close_sockets()


@dataclass
class ListeningConnection(Connection):
    """Base class of connections whose workers listen at an `Endpoint`, which they can open before they have a rank.

    Attributes:
        timeout_s: How long a collective may wait for other ranks before it raises.
        form_timeout_s: How long ranks may take to form a group. `timeout_s` is the upper limit.
    """

    timeout_s: float = field(default=1800.0, kw_only=True)
    form_timeout_s: float = field(default=FORM_TIMEOUT_S, kw_only=True)

    def __post_init__(self) -> None:
        self._variables_before: dict[str, str | None] = {}
        self._forget_group()

    def _forget_group(self) -> None:
        """Set the attributes that describe the current group as they are outside any group."""
        self._endpoint: Endpoint | None = None
        self._parts: list[Mesh | Board] = []
        self._is_interrupted = False

    def open_endpoint(self, host: str) -> int:
        self._endpoint = Endpoint(host)
        return self._endpoint.port

    @property
    def _form_timeout_s(self) -> float:
        return min(self.form_timeout_s, self.timeout_s)

    def _meet(self, rendezvous: Rendezvous, world: World, *lanes: Collection[int]) -> list[Connections]:
        """Connect this rank to other ranks. See `Endpoint.connect`."""
        assert self._endpoint is not None, "a rank of several listens before it joins the others"
        self._form_until = time.monotonic() + self._form_timeout_s
        return self._endpoint.connect(rendezvous, world.rank, lanes, self._check_forming)

    def _check_forming(self) -> None:
        """Raise an error if this rank must no longer wait until the group has formed.

        Raises:
            ConnectFailed: The group takes too long, or this rank was interrupted.
        """
        if self._is_interrupted or time.monotonic() > self._form_until:
            raise ConnectFailed("another rank failed, or was too slow to join the group")

    def _set_variables(self, variables: Mapping[str, str]) -> None:
        """Set environment variables of this process until it leaves the group."""
        for name, value in variables.items():
            self._variables_before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def interrupt(self) -> None:
        self._is_interrupted = True
        for part in self._parts:
            part.interrupt()

    def leave(self) -> None:
        for part in self._parts:
            part.close_sockets()
        if self._endpoint is not None:
            self._endpoint.close_sockets()
        self._forget_group()
        while self._variables_before:
            name, value = self._variables_before.popitem()
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Pending(NamedTuple):
    """A handshake in progress.

    Attributes:
        connection: The socket to the other side.
        handshake: The generator that performs the handshake.
        call: The rank that this rank has called, and the lane. None if the other side has called. Since any process may
            call, such a handshake may fail without an error.
    """

    connection: socket.socket
    handshake: Handshake
    call: tuple[int, int] | None


class _Meeting:
    """Connects a rank to other ranks: see `Endpoint.connect`. No handshake waits for another handshake.

    Args:
        rendezvous: The ranks' addresses and the group's secret.
        rank: This rank.
        lanes: For each lane, the ranks to connect to.
        listener: The socket to which other ranks connect.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, lanes: Sequence[Collection[int]], listener: socket.socket
    ) -> None:
        self._rendezvous, self._rank, self._listener = rendezvous, rank, listener
        self._connections: list[Connections] = [{} for _ in lanes]
        self._num_wanted = sum(map(len, lanes))
        # The ranks that this rank calls, with the lane, unless the call has begun.
        self._due = [(other, lane) for lane, ranks in enumerate(lanes) for other in ranks if other < rank]
        # Beyond this number of handshakes that other processes have started, the oldest of them are dropped, starting
        # with processes that have not sent a valid greeting.
        self._most_accepted = self._num_wanted - len(self._due) + _MOST_STRANGERS
        self._pending: dict[int, _Pending] = {}  # by file descriptor
        self._greeted: set[int] = set()  # file descriptors of connections over which a valid greeting has arrived
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def connect(self, check: Callable[[], None]) -> list[Connections]:
        """Connect to the ranks of all lanes. Return each lane's sockets."""
        try:
            with OnFailure(self._disconnect):
                while sum(map(len, self._connections)) < self._num_wanted:
                    due, self._due = self._due, []
                    for rank, lane in due:
                        self._call(rank, lane)
                    check()
                    self._listen()
        except ConnectFailed:
            raise
        except OSError as error:
            raise ConnectFailed(f"rank {self._rank} could not connect to the others: {error}") from error
        finally:
            self._drop(self._pending)
        return self._connections

    def _disconnect(self) -> None:
        for lane in self._connections:
            for connection in lane.values():
                connection.close()

    def _call(self, rank: int, lane: int) -> None:
        """Open a connection to another rank, and start the handshake with that rank."""
        address = self._rendezvous.addresses[rank]
        connection = _socket_for(address)
        code = connection.connect_ex(_name_of(address))
        if code in (0, errno.EINPROGRESS):
            handshake = initiate(connection, self._rendezvous.secret, self._rank, rank, lane)
            self._start(connection, handshake, (rank, lane))
            return
        connection.close()
        if code != errno.EAGAIN:
            raise OSError(code, os.strerror(code))
        self._due.append((rank, lane))  # retry later: that rank's queue of incoming connections is full

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            try:
                _disable_nagle(connection)
            except OSError:  # on macOS, this means that the connection has already ended
                connection.close()
                continue
            connection.setblocking(False)
            note_greeting = partial(self._greeted.add, connection.fileno())
            self._start(connection, respond(connection, self._rendezvous.secret, self._rank, note_greeting), None)

    def _start(self, connection: socket.socket, handshake: Handshake, call: tuple[int, int] | None) -> None:
        self._pending[connection.fileno()] = _Pending(connection, handshake, call)
        self._poll.register(connection, select.POLLIN)
        self._advance(connection.fileno())

    def _listen(self) -> None:
        """Advance the handshakes and accept new connections. Wait up to `_POLL_S` seconds if there is nothing to do."""
        listening, is_called = self._listener.fileno(), False
        for number, _ in self._poll.poll(_POLL_S * 1000):
            if number == listening:
                is_called = True
            else:
                self._advance(number)
        if is_called:
            self._accept()
            accepted = [number for number, pending in self._pending.items() if pending.call is None]
            accepted.sort(key=self._greeted.__contains__)
            self._drop(accepted[: max(0, len(accepted) - self._most_accepted)])

    def _advance(self, number: int) -> None:
        pending = self._pending[number]
        try:
            self._poll.modify(number, next(pending.handshake))
        except StopIteration as end:
            rank, lane = end.value
            self._connections[lane][rank] = self._forget(number)
        except OSError as error:
            if pending.call is not None:
                if not isinstance(error, ConnectionResetError | BrokenPipeError):
                    raise
                # Retry: that rank dropped the connection because it has too many handshakes, or has stopped listening.
                self._due.append(pending.call)
            self._drop([number])

    def _drop(self, numbers: Iterable[int]) -> None:
        """Close the connections with these file descriptors and abandon their handshakes."""
        for number in list(numbers):
            self._forget(number).close()

    def _forget(self, number: int) -> socket.socket:
        self._poll.unregister(number)
        self._greeted.discard(number)
        return self._pending.pop(number).connection


def _listen_at_name(host: str) -> tuple[socket.socket, socket.socket, int] | None:
    """Listen at a Unix socket with a random abstract name. Any user of the machine could bind a predictable name.

    Returns:
        A socket that reserves a free TCP port, the listening socket, and the number that encodes the listening socket's
        name. None if Unix sockets are not possible, for example in a sandbox.
    """
    holding, listener = socket.socket(), socket.socket(socket.AF_UNIX)
    try:
        holding.bind((host, 0))
        number = 1 + secrets.randbits(128) << PORT_BITS | holding.getsockname()[1]
        listener.bind(_name_of((host, number)))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        holding.close()
        logger.warning("connecting the workers of this node over TCP, as there can be no Unix socket: %s", error)
        return None
    return holding, listener, number


def has_names(host: str) -> bool:
    """Return True if ranks at the address `host` listen at Unix sockets where possible.

    In a sandbox that forbids Unix sockets, these ranks use TCP instead.
    """
    return _HAS_NAMES and host == LOOPBACK


def _name_of(address: Address) -> Address | bytes:
    """Return the address in the form that `bind` and `connect` expect.

    This is the address itself, or the abstract name of the Unix socket if the address's port encodes such a name.
    Abstract names are visible in the whole network namespace.
    """
    return b"\0raysgd/%x" % address[1] if address[1] >> PORT_BITS else address


def _socket_for(address: Address) -> socket.socket:
    family = socket.AF_UNIX if address[1] >> PORT_BITS else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    _disable_nagle(connection)
    return connection


def _disable_nagle(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# First message of a handshake: connecting rank, lane, nonce, and an HMAC that proves knowledge of the secret.
_HELLO = struct.Struct("<II16s32s")
_NOT_YET = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOTCONN)  # macOS reports ENOTCONN while connecting


class ConnectFailed(ConnectionError):
    """The group could not be formed, because another rank failed, was too late, or cannot be reached."""


Handshake: TypeAlias = Generator[int, None, tuple[int, int]]
"""A handshake in progress. Whenever it must wait for the other side, it yields the events to pass to `select.poll`.

It returns the other side's rank, and the index of the lane to which the connection belongs.
"""


def proof_of(secret: bytes, role: bytes, initiator: int, responder: int, lane: int, nonces: bytes) -> bytes:
    """Return the HMAC with which one side of a connection proves that it knows the group's secret.

    The HMAC covers the nonces, the role, the ranks and the lane. A recorded proof is therefore invalid for any other
    connection. The greeting is an exception, because it covers no nonce from the other side. It can be replayed, but
    does not complete a handshake.

    Args:
        secret: The group's secret.
        role: The step of the handshake to which the proof belongs.
        initiator: The connecting rank.
        responder: The accepting rank.
        lane: Index of the lane to which the connection belongs.
        nonces: The nonces sent so far in this handshake.
    """
    return hmac.digest(secret, role + struct.pack("<III", initiator, responder, lane) + nonces, "sha256")


def initiate(connection: socket.socket, secret: bytes, rank: int, responder: int, lane: int) -> Handshake:
    """Perform the connecting side's part of the handshake with rank `responder`.

    The socket may still be connecting.
    """
    own = secrets.token_bytes(_NONCE_LENGTH)
    greeting = proof_of(secret, b"greeting", rank, responder, lane, own)
    yield from _sent(connection, _HELLO.pack(rank, lane, own, greeting))
    answer = yield from _received(connection, _NONCE_LENGTH + _PROOF_LENGTH)
    nonces, proof = own + answer[:_NONCE_LENGTH], answer[_NONCE_LENGTH:]
    if not hmac.compare_digest(proof, proof_of(secret, b"responder", rank, responder, lane, nonces)):
        raise ConnectFailed(f"the process that listens in place of rank {responder} does not belong to the group")
    yield from _sent(connection, proof_of(secret, b"initiator", rank, responder, lane, nonces))
    return responder, lane


def respond(connection: socket.socket, secret: bytes, rank: int, note_greeting: Callable[[], None]) -> Handshake:
    """Perform the accepting side's part of the handshake.

    Call `note_greeting` if the other side's greeting is valid.
    """
    initiator, lane, other, greeting = _HELLO.unpack((yield from _received(connection, _HELLO.size)))
    if hmac.compare_digest(greeting, proof_of(secret, b"greeting", initiator, rank, lane, other)):
        note_greeting()
    own = secrets.token_bytes(_NONCE_LENGTH)
    nonces = other + own
    yield from _sent(connection, own + proof_of(secret, b"responder", initiator, rank, lane, nonces))
    proof = yield from _received(connection, _PROOF_LENGTH)
    if not hmac.compare_digest(proof, proof_of(secret, b"initiator", initiator, rank, lane, nonces)):
        raise ConnectFailed("a process that connected does not belong to the group")
    return initiator, lane


def _sent(connection: socket.socket, message: bytes) -> Generator[int, None, None]:
    while message:
        try:
            message = message[connection.send(message) :]
        except OSError as error:
            if error.errno not in _NOT_YET:
                raise
            yield select.POLLOUT


def _received(connection: socket.socket, length: int) -> Generator[int, None, bytes]:
    received = b""
    while len(received) < length:
        try:
            part = connection.recv(length - len(received))
        except OSError as error:
            if error.errno not in _NOT_YET:
                raise
            yield select.POLLIN
            continue
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "another rank left before the group was formed")
        received += part
    return received
