"""How ranks find each other over sockets: who comes in, whom one calls on, and for how long one waits.

Any process that reaches the port may connect. Both sides show that they belong to the group by a secret, which the
driver made for this meeting and which travelled through Ray: each proves that it knows the secret by what it makes of a
number that the other side has just drawn. The secret itself is never sent. Strangers are refused and delay no one.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_GREETING_S = 30.0  # who has not shown by then that it belongs here is sent away
_BACKLOG = 4096
_HELLO = struct.Struct("<II16s")  # the rank that calls, a number of its own, and a number to make something of
_NONCE_LENGTH = 16
_PROOF_LENGTH = 32
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY)

Address: TypeAlias = tuple[str, int]
"""Host, as a number, and port."""


class MeetingFailed(ConnectionError):
    """Another rank failed, did not come in time, or cannot be reached, before the group was formed."""


class Deadline:
    """How long to wait for other ranks, from now on.

    Args:
        timeout_s: At most so long.
        is_interrupted: Asked again and again; once it says so, the wait is over.
    """

    def __init__(self, timeout_s: float, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        self.timeout_s = timeout_s
        self._is_interrupted = is_interrupted
        self._deadline = time.monotonic() + timeout_s

    def check(self) -> None:
        """Raises when it is at its end.

        Raises:
            MeetingFailed: It is.
        """
        if self._is_interrupted() or time.monotonic() > self._deadline:
            raise MeetingFailed("another rank failed, or took too long, before it joined the group")

    def wait(self, connection: socket.socket, events: int) -> None:
        """Until something can be done with the connection.

        Raises:
            MeetingFailed: That took too long.
        """
        poll = select.poll()
        poll.register(connection, events)
        while not poll.poll(_POLL_S * 1000):
            self.check()


def listen_at(host: str) -> socket.socket:
    """Listens at a free port of this address; of all addresses, where this machine does not have that one.

    A machine whose address is translated is known to the others by one that it does not have itself.
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


@dataclass(frozen=True)
class Peer:
    """A rank that was met.

    Attributes:
        connection: To it; does not block.
        rank: Who it is.
        number: What it said beside, or was told.
    """

    connection: socket.socket
    rank: int
    number: int


@dataclass(frozen=True)
class Badge:
    """What a rank shows of itself.

    Attributes:
        rank: Who it is.
        secret: What ranks of the group know.
    """

    rank: int
    secret: bytes

    def proof(self, role: bytes, caller: int, host: int, number: int, drawn: bytes) -> bytes:
        """What only a peer that knows the secret can send to the one that drew these numbers, in this role."""
        return hmac.digest(self.secret, role + struct.pack("<III", caller, host, number) + drawn, "sha256")

    def greet(self, connection: socket.socket, host: int, number: int) -> _Talk:
        """As the one that calls on rank `host`."""
        own = secrets.token_bytes(_NONCE_LENGTH)
        connection.sendall(_HELLO.pack(self.rank, number, own))
        other = yield from _hear(connection, _NONCE_LENGTH)
        proof = yield from _hear(connection, _PROOF_LENGTH)
        if not hmac.compare_digest(proof, self.proof(b"host", self.rank, host, number, own + other)):
            raise MeetingFailed(f"the process that listens in place of rank {host} does not belong to the group")
        connection.sendall(self.proof(b"caller", self.rank, host, number, own + other))
        return Peer(connection, host, number)

    def receive(self, connection: socket.socket) -> _Talk:
        """As the one that is called on."""
        caller, number, other = _HELLO.unpack((yield from _hear(connection, _HELLO.size)))
        own = secrets.token_bytes(_NONCE_LENGTH)
        connection.sendall(own + self.proof(b"host", caller, self.rank, number, other + own))
        proof = yield from _hear(connection, _PROOF_LENGTH)
        if not hmac.compare_digest(proof, self.proof(b"caller", caller, self.rank, number, other + own)):
            raise MeetingFailed("a stranger called")
        return Peer(connection, caller, number)


_Talk: TypeAlias = Generator[None, None, Peer]
"""What two ranks say to each other until they know each other; yields where it waits for the other side."""


def _hear(connection: socket.socket, length: int) -> Generator[None, None, bytes]:
    heard = b""
    while len(heard) < length:
        try:
            part = connection.recv(length - len(heard))
        except BlockingIOError:
            yield
            continue
        if not part:
            raise MeetingFailed("another rank left before the group was formed")
        heard += part
    return heard


def call_on(address: Address, deadline: Deadline) -> socket.socket:
    """Connects to another rank.

    Raises:
        OSError: No rank listens there.
        MeetingFailed: It took too long.
    """
    host, port = address
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        code = connection.connect_ex((host, port))
        if code in _UNDER_WAY:
            deadline.wait(connection, select.POLLOUT)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "unknown error"))
    except BaseException:
        connection.close()
        raise
    return connection


class PeerListener:
    """Listens at a port.

    Args:
        host: Under which address.
    """

    def __init__(self, host: str) -> None:
        self._listener = listen_at(host)
        self._listener.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def meet(
        self, badge: Badge, hosts: Collection[tuple[int, Address]], num_peers: int, num_lanes: int, deadline: Deadline
    ) -> list[Peer]:
        """Calls on some ranks and receives others, each as often as there are lanes; returns when all were met.

        Args:
            badge: Who this is.
            hosts: Whom to call on: their ranks and where they listen.
            num_peers: How many come, of whom each knows the secret.
            num_lanes: How often.
            deadline: How long to wait for the others.

        Raises:
            OSError: No rank listens where one should be.
            MeetingFailed: Another rank is gone or late, or does not belong to the group.
        """
        with ExitStack() as undo:
            talks = _Talks(undo, self._listener)
            for rank, address in hosts:
                for lane in range(num_lanes):
                    connection = undo.enter_context(call_on(address, deadline))
                    talks.begin(connection, badge.greet(connection, rank, lane))
            while len(talks.known) < (len(hosts) + num_peers) * num_lanes:
                deadline.check()
                if talks.go_on():
                    self._let_in(badge, talks)
            talks.send_away(talks.open)
            undo.pop_all()
        return talks.known

    def _let_in(self, badge: Badge, talks: _Talks) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            connection.setblocking(False)
            talks.undo.enter_context(connection)
            talks.begin(connection, badge.receive(connection), time.monotonic() + _GREETING_S)


class _Talks:
    """Those that go on at the same time.

    Args:
        undo: Closes all connections where it comes to nothing.
        listener: Where others call.

    Attributes:
        known: Who was met.
        open: Whom one talks to, by the number of the connection.
    """

    def __init__(self, undo: ExitStack, listener: socket.socket) -> None:
        self.undo = undo
        self.known: list[Peer] = []
        self.open: dict[int, _Open] = {}
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def begin(self, connection: socket.socket, talk: _Talk, until: float = math.inf) -> None:
        """Begins one; with somebody who may be a stranger, it ends at a time."""
        number = connection.fileno()
        self.open[number] = _Open(connection, talk, until)
        self._poll.register(connection, select.POLLIN)
        self._go_on_with(number)

    def go_on(self) -> bool:
        """Waits for a moment until somebody speaks, and goes on with those; returns whether anybody calls."""
        ready = {number for number, _ in self._poll.poll(_POLL_S * 1000)}
        for number in ready & self.open.keys():
            self._go_on_with(number)
        now = time.monotonic()
        self.send_away([number for number, one in self.open.items() if now > one.until])
        return self._listener.fileno() in ready

    def _go_on_with(self, number: int) -> None:
        one = self.open[number]
        try:
            next(one.talk)
        except StopIteration as end:
            del self.open[number]
            self._poll.unregister(number)
            self.known.append(end.value)
        except OSError:
            if one.until == math.inf:
                raise
            self.send_away([number])

    def send_away(self, numbers: Iterable[int]) -> None:
        """Those who have not shown that they belong here."""
        for number in list(numbers):
            self._poll.unregister(number)
            self.open.pop(number).connection.close()


@dataclass(frozen=True)
class _Open:
    """A talk that has not come to its end."""

    connection: socket.socket
    talk: _Talk
    until: float
