"""How ranks connect to each other: each listens, connects to some and accepts others.

A process that does not belong to the group is refused, see `_handshake.py`, and delays no one.

Why ranks meet through Ray and not through a store: ADR 55.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeAlias

from raysgd.connections._handshake import ConnectFailed, Credentials, Handshake, Peer

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_HANDSHAKE_S = 30.0  # a process that has proved nothing by then is disconnected
_LOOK_S = 1.0  # between two looks for such a process
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


class Call(NamedTuple):
    """A connection to make.

    Attributes:
        rank: To whom.
        lane: Which of several connections to that rank it is.
        address: Where that rank listens.
    """

    rank: int
    lane: int
    address: Address


class PeerListener:
    """Listens at a port, and connects this rank to others."""

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
        self, credentials: Credentials, calls: Collection[Call], num_accepted: int, deadline: Deadline
    ) -> list[Peer]:
        """Connects to some ranks and accepts others; returns when all are connected.

        Args:
            credentials: Those of this rank.
            calls: The connections to make.
            num_accepted: How many connections others make to this rank.
            deadline: How long to wait for the others.

        Raises:
            OSError: No rank listens where one should.
            ConnectFailed: Another rank is gone or late, or does not belong to the group.
        """
        handshakes = _Handshakes(credentials, self._listener)
        try:
            for call in calls:
                handshakes.call(call)
            while len(handshakes.peers) < len(calls) + num_accepted:
                deadline.check()
                handshakes.poll()
        except BaseException:
            for peer in handshakes.peers:
                peer.connection.close()
            raise
        finally:
            handshakes.drop(handshakes.pending)
        return handshakes.peers


class _Pending:
    """A handshake in progress.

    Attributes:
        connection: To the other side.
        handshake: What goes on there.
        until: When it is given up. Its failure is then not this rank's: any process may have connected.
        events: What it waits for.
    """

    __slots__ = ("connection", "events", "handshake", "until")

    def __init__(self, connection: socket.socket, handshake: Handshake, until: float) -> None:
        self.connection, self.handshake, self.until = connection, handshake, until
        self.events = select.POLLIN


class _Handshakes:
    """Many at the same time, so that none waits for another.

    Args:
        credentials: Those of this rank.
        listener: Where others connect.

    Attributes:
        peers: Those that have succeeded.
        pending: Those in progress, by file descriptor.
    """

    def __init__(self, credentials: Credentials, listener: socket.socket) -> None:
        self.peers: list[Peer] = []
        self.pending: dict[int, _Pending] = {}
        self._credentials, self._listener = credentials, listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._looks_at = 0.0

    def call(self, call: Call) -> None:
        """Connects to a rank and starts to prove who this one is."""
        connection = _socket_for(call.address)
        self._start(connection, self._credentials.initiate(connection, call.rank, call.lane), math.inf)
        code = connection.connect_ex(call.address)
        if code and code not in _IN_PROGRESS:
            raise OSError(code, os.strerror(code))
        self._advance(connection.fileno())

    def _accept(self) -> None:
        until = time.monotonic() + _HANDSHAKE_S
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            connection.setblocking(False)
            self._start(connection, self._credentials.respond(connection), until)
            self._advance(connection.fileno())

    def _start(self, connection: socket.socket, handshake: Handshake, until: float) -> None:
        self.pending[connection.fileno()] = _Pending(connection, handshake, until)
        self._poll.register(connection, select.POLLIN)

    def poll(self) -> None:
        """Waits a moment for data and for processes that connect, and advances what got some."""
        listening, is_called = self._listener.fileno(), False
        for number, _ in self._poll.poll(_POLL_S * 1000):
            if number == listening:
                is_called = True
            else:
                self._advance(number)
        self._drop_late()
        if is_called:
            self._accept()

    def _advance(self, number: int) -> None:
        one = self.pending[number]
        try:
            events = next(one.handshake)
        except StopIteration as end:
            del self.pending[number]
            self._poll.unregister(number)
            self.peers.append(end.value)
        except OSError:
            if one.until == math.inf:
                raise
            self.drop([number])
        else:
            if events != one.events:
                one.events = events
                self._poll.modify(number, events)

    def _drop_late(self) -> None:
        now = time.monotonic()
        if now > self._looks_at:
            self._looks_at = now + _LOOK_S
            self.drop([number for number, one in self.pending.items() if now > one.until])

    def drop(self, numbers: Iterable[int]) -> None:
        """Disconnects processes that have proved nothing."""
        for number in list(numbers):
            self._poll.unregister(number)
            self.pending.pop(number).connection.close()


def _socket_for(address: Address) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    return connection
