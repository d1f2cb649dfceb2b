"""How ranks find each other over sockets: who comes in, whom one calls on, and for how long one waits.

Any process that reaches the port may connect. A rank shows that it belongs to the group by a secret, which the driver
made for this meeting and which travelled through Ray. Strangers are sent away, and hold nobody up.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

_POLL_S = 0.05
_GREETING_S = 10.0
_GREETING = struct.Struct("<16sII")  # the secret, the rank that speaks, and a number of its own
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY)


class MeetingFailed(ConnectionError):
    """Another rank failed, did not come in time, or cannot be reached, before the group was formed."""


class Patience:
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


def call_on(host: str, port: int, secret: bytes, rank: int, number: int, patience: Patience) -> socket.socket:
    """Connects to another rank and introduces itself.

    Args:
        host: Where that rank is.
        port: Where it listens.
        secret: What ranks of the group know.
        rank: Who is calling.
        number: Something to say beside.
        patience: How long to try.

    Raises:
        OSError: Nobody is there.
        MeetingFailed: It took too long.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        code = connection.connect_ex(address)
        if code in _UNDER_WAY:
            patience.wait(connection, select.POLLOUT)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "unknown error"))
        send(connection, _GREETING.pack(secret, rank, number), patience)
    except BaseException:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, data: bytes, patience: Patience) -> None:
    """Sends all of `data`.

    Raises:
        OSError: The connection ended.
        MeetingFailed: It took too long.
    """
    rest = memoryview(data)
    while rest:
        patience.wait(connection, select.POLLOUT)
        rest = rest[connection.send(rest) :]


def receive(connection: socket.socket, length: int, patience: Patience) -> bytes:
    """The next `length` bytes that come.

    Raises:
        OSError: The connection ended.
        MeetingFailed: It took too long, or the other side left.
    """
    received = bytearray()
    while len(received) < length:
        patience.wait(connection, select.POLLIN)
        part = connection.recv(length - len(received))
        if not part:
            raise MeetingFailed("another rank left before the group was formed")
        received += part
    return bytes(received)


@dataclass(frozen=True)
class Guest:
    """A rank that came.

    Attributes:
        connection: To it; does not block.
        rank: Who it is.
        number: What it said beside.
    """

    connection: socket.socket
    rank: int
    number: int


@dataclass
class _Caller:
    """Somebody who has not said everything yet."""

    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)

    def listen(self) -> bool:
        """Hears what it says; returns whether it is still to be listened to."""
        try:
            part = self.connection.recv(_GREETING.size - len(self.said))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.said += part
        return bool(part)

    @property
    def is_done(self) -> bool:
        return len(self.said) == _GREETING.size


class Reception:
    """Listens at a port.

    Args:
        host: Under which address; empty for all of them.
    """

    def __init__(self, host: str = "") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=512)
        self._listener.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def guests(self, secret: bytes, patience: Patience) -> Generator[Guest]:
        """Those who come and know the secret, one after the other, without end; to be closed when all are there.

        Raises:
            MeetingFailed: Nobody came for too long.
        """
        callers: dict[int, _Caller] = {}
        try:
            while True:
                patience.check()
                self._wait_for(callers)
                self._let_in(callers)
                for number, caller in list(callers.items()):
                    if caller.listen() and time.monotonic() < caller.until:
                        if not caller.is_done:
                            continue
                        told, rank, beside = _GREETING.unpack(caller.said)
                        if hmac.compare_digest(told, secret):
                            del callers[number]
                            yield Guest(caller.connection, rank, beside)
                            continue
                    callers.pop(number).connection.close()  # it came by mistake
        finally:
            for caller in callers.values():
                caller.connection.close()

    def _wait_for(self, callers: dict[int, _Caller]) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for number in callers:
            poll.register(number, select.POLLIN)
        poll.poll(_POLL_S * 1000)

    def _let_in(self, callers: dict[int, _Caller]) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        connection.setblocking(False)
        callers[connection.fileno()] = _Caller(connection, time.monotonic() + _GREETING_S)


def expect(reception: Reception, secret: bytes, count: int, patience: Patience) -> Iterator[Guest]:
    """The next `count` guests."""
    guests = reception.guests(secret, patience)
    try:
        yield from itertools.islice(guests, count)
    finally:
        guests.close()
