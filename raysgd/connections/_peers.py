"""How ranks connect to each other: each listens, connects to the ranks before it, and accepts those after it.

A process that does not belong to the group is refused, see `_handshake.py`, and delays no one.

Why ranks meet through Ray and not through a store: ADR 55.
"""

from __future__ import annotations

import errno
import logging
import math
import select
import socket
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

from raysgd.connections._handshake import ConnectFailed, Credentials, Handshake, Peer

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_HANDSHAKE_S = 30.0  # a process that has proved nothing by then is disconnected
_BACKLOG = 4096
_IN_PROGRESS = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY)

Address: TypeAlias = tuple[str, int]
"""Host, as a number, and port."""


class Deadline:
    """How long to wait for other ranks, from now on.

    Args:
        timeout_s: At most this long.
        is_interrupted: Asked again and again; once it returns True, the wait is over.
    """

    def __init__(self, timeout_s: float, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        self.timeout_s = timeout_s
        self._is_interrupted = is_interrupted
        self._deadline = time.monotonic() + timeout_s

    def check(self) -> None:
        """Does nothing before the deadline.

        Raises:
            ConnectFailed: It has passed, or the wait was interrupted.
        """
        if self._is_interrupted() or time.monotonic() > self._deadline:
            raise ConnectFailed("another rank failed, or was too slow to join the group")

    def wait(self, connection: socket.socket, events: int) -> None:
        """Waits until the connection is ready for one of these events.

        Raises:
            ConnectFailed: That took too long.
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


def connect_to(address: Address, deadline: Deadline) -> socket.socket:
    """Connects to another rank.

    Raises:
        OSError: No rank listens there.
        ConnectFailed: It took too long.
    """
    host, port = address
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        code = connection.connect_ex((host, port))
        if code in _IN_PROGRESS:
            deadline.wait(connection, select.POLLOUT)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "unknown error"))
    except BaseException:
        connection.close()
        raise
    return connection


class PeerListener:
    """Listens at a port, and connects this rank to all others."""

    def __init__(self, host: str) -> None:
        self._listener = listen_at(host)
        self._listener.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def connect_all(
        self,
        credentials: Credentials,
        addresses: Collection[tuple[int, Address]],
        num_accepted: int,
        num_lanes: int,
        deadline: Deadline,
    ) -> list[Peer]:
        """Connects to some ranks and accepts others, each once for each lane; returns when all are connected.

        Args:
            credentials: Those of this rank.
            addresses: The ranks to connect to, and where they listen.
            num_accepted: How many other ranks connect to this one.
            num_lanes: The number of connections to each rank.
            deadline: How long to wait for the others.

        Raises:
            OSError: No rank listens where one should.
            ConnectFailed: Another rank is gone or late, or does not belong to the group.
        """
        with ExitStack() as undo:
            handshakes = _Handshakes(undo, self._listener)
            for rank, address in addresses:
                for lane in range(num_lanes):
                    connection = undo.enter_context(connect_to(address, deadline))
                    handshakes.start(connection, credentials.initiate(connection, rank, lane))
            while len(handshakes.peers) < (len(addresses) + num_accepted) * num_lanes:
                deadline.check()
                if handshakes.poll():
                    self._accept(credentials, handshakes)
            handshakes.drop(handshakes.pending)
            undo.pop_all()
        return handshakes.peers

    def _accept(self, credentials: Credentials, handshakes: _Handshakes) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            connection.setblocking(False)
            handshakes.undo.enter_context(connection)
            handshakes.start(connection, credentials.respond(connection), time.monotonic() + _HANDSHAKE_S)


@dataclass(frozen=True)
class _Pending:
    """A handshake in progress."""

    connection: socket.socket
    handshake: Handshake
    until: float


class _Handshakes:
    """Many at the same time, so that none waits for another.

    Args:
        undo: Closes all connections if this rank cannot connect to all others.
        listener: Where others connect.

    Attributes:
        peers: Those that have succeeded.
        pending: Those in progress, by file descriptor.
    """

    def __init__(self, undo: ExitStack, listener: socket.socket) -> None:
        self.undo = undo
        self.peers: list[Peer] = []
        self.pending: dict[int, _Pending] = {}
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def start(self, connection: socket.socket, handshake: Handshake, until: float = math.inf) -> None:
        """Starts one. With a time limit, its failure is not this rank's: any process may have connected."""
        number = connection.fileno()
        self.pending[number] = _Pending(connection, handshake, until)
        self._poll.register(connection, select.POLLIN)
        self._advance(number)

    def poll(self) -> bool:
        """Waits a moment for data and advances what got some; returns whether a process is waiting to be accepted."""
        ready = {number for number, _ in self._poll.poll(_POLL_S * 1000)}
        for number in ready & self.pending.keys():
            self._advance(number)
        now = time.monotonic()
        self.drop([number for number, one in self.pending.items() if now > one.until])
        return self._listener.fileno() in ready

    def _advance(self, number: int) -> None:
        one = self.pending[number]
        try:
            next(one.handshake)
        except StopIteration as end:
            del self.pending[number]
            self._poll.unregister(number)
            self.peers.append(end.value)
        except OSError:
            if one.until == math.inf:
                raise
            self.drop([number])

    def drop(self, numbers: Iterable[int]) -> None:
        """Disconnects processes that have proved nothing."""
        for number in list(numbers):
            self._poll.unregister(number)
            self.pending.pop(number).connection.close()
