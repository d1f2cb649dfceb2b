"""The board: a key-value store that all ranks of a group read and write. Each rank has a full copy.

Unlike a server, the board has no host that could die. A written value is forwarded to all other ranks, from neighbor to
neighbor; a rank's neighbors are the ranks to which it has a connection. The board needs only sockets and one thread per
rank. The thread receives messages, and sends the bytes that a socket did not accept immediately.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from raysgd.core.connections.mesh.mesh import MeshBroken

_HEAD = struct.Struct("<III")  # header of a message: rank that wrote the value, length of the key, length of the value
_PART = 1 << 16
_INTERRUPTED = "it was interrupted"


class BoardMessage(NamedTuple):
    """A key and its value, on the way from the rank that wrote them to another rank.

    Attributes:
        source: The rank that wrote the value.
        key: Key on the board.
        value: Value to store under the key.
    """

    source: int
    key: str
    value: bytes

    @property
    def encoded(self) -> bytes:
        """The message as the bytes to send."""
        name = self.key.encode()
        return b"".join((_HEAD.pack(self.source, len(name), len(self.value)), name, self.value))


def taken_from(received: bytearray) -> list[BoardMessage]:
    """Remove all complete messages from the start of a buffer of received bytes, and return them decoded."""
    messages, start, num_received = [], 0, len(received)
    while num_received - start >= _HEAD.size:
        source, length, num_bytes = _HEAD.unpack_from(received, start)
        middle = start + _HEAD.size + length
        if middle + num_bytes > num_received:
            break
        key = received[start + _HEAD.size : middle].decode()
        start = middle + num_bytes
        messages.append(BoardMessage(source, key, bytes(received[middle:start])))
    del received[:start]
    return messages


class _Link:
    """This rank's connection to one of its neighbors.

    Args:
        rank: Rank of the neighbor.
        connection: Socket connected to the neighbor.
        wake: Called if the socket has not accepted all bytes. It must make another thread send the remaining bytes.
    """

    __slots__ = ("_received", "_sending", "_unsent", "_wake", "connection", "rank")

    def __init__(self, rank: int, connection: socket.socket, wake: Callable[[], None]) -> None:
        connection.setblocking(False)
        self.rank, self.connection, self._wake = rank, connection, wake
        self._received, self._unsent = bytearray(), bytearray()
        self._sending = threading.Lock()

    def send(self, data: bytes = b"") -> None:
        """Send buffered bytes, then data, without blocking. Bytes that the socket does not accept now are buffered."""
        with self._sending:
            was_idle = not self._unsent
            self._unsent += data
            with suppress(BlockingIOError):
                del self._unsent[: self.connection.send(self._unsent)]
            if was_idle and self._unsent:
                self._wake()

    @property
    def awaited_events(self) -> int:
        """The poll events for which to watch the socket. While it has buffered bytes, it must also be able to send."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def receive(self) -> list[BoardMessage]:
        """Receive the bytes that have arrived, and return the messages that are complete."""
        part = self.connection.recv(_PART)
        if not part:
            raise ConnectionError("it has left, or has lost another rank")
        self._received += part
        return taken_from(self._received)

    def cut(self) -> None:
        """Shut down the connection. May be called from any thread."""
        with suppress(OSError):  # already shut down
            self.connection.shutdown(socket.SHUT_RDWR)

    def close_socket(self) -> None:
        """Close the socket. Afterwards, this object never calls `wake` again."""
        with self._sending:
            self.connection.close()


def others(rank: int, size: int) -> set[int]:
    """Return all ranks of a group of `size` ranks except `rank`."""
    return set(range(size)) - {rank}


def neighbors(rank: int, size: int) -> set[int]:
    """Return the neighbors of a rank: the ranks at a power-of-two distance in both directions.

    A rank has a connection to each of its neighbors. With N ranks, these are about 2 log2 N connections, and a message
    reaches all ranks within log2 N hops.
    """
    steps = [1 << power for power in range((size - 1).bit_length())]
    return {(rank + step) % size for step in steps} | {(rank - step) % size for step in steps}


def next_of_all(rank: int, source: int, size: int) -> list[int]:
    """Return the neighbors to which `rank` forwards a message that `source` wrote.

    Every rank gets each message once.
    """
    distance = (rank - source) % size
    powers = range(distance.bit_length(), (size - 1).bit_length())
    return [(rank + (1 << power)) % size for power in powers if distance + (1 << power) < size]


class BoardTimeout(MeshBroken):
    """No rank wrote the awaited value to the board in time."""


class Board:
    """One rank's copy of the board, the key-value store that all ranks of a group share.

    If one connection ends, this rank shuts down all its connections, so that all ranks notice the failure.

    Args:
        rank: This rank.
        size: Number of ranks.
        connections: The socket to each neighbor, see `neighbors`. The board has exclusive use of the sockets.
    """

    def __init__(self, rank: int, size: int, connections: Mapping[int, socket.socket]) -> None:
        self._rank, self._size = rank, size
        self._values: dict[str, bytes] = {}
        self._broken_by = ""
        self._is_cut = False
        self._has_changed = threading.Condition()
        # Writing to the second end of this pipe wakes the receiving thread.
        self._bell: tuple[int, ...] = os.pipe() if connections else ()
        self._links = {rank: _Link(rank, each, self._wake) for rank, each in connections.items()}
        self._by_number = {link.connection.fileno(): link for link in self._links.values()}
        self._poll = select.poll()
        for number in (*self._by_number, *self._bell[:1]):
            self._poll.register(number, select.POLLIN)
        self._receiver = threading.Thread(target=self._receive, name="raysgd-board", daemon=True)
        if connections:
            self._receiver.start()

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait until all keys have values on the board.

        Raises:
            BoardTimeout: A key still has no value after `timeout_s` seconds.
            MeshBroken: A connection has ended, so the values may never arrive.
        """
        if self.has(keys):
            return
        awaited, what = set(keys), f"gave up waiting for {', '.join(keys)}"
        with self._has_changed:
            is_over = self._has_changed.wait_for(
                lambda: bool(self._broken_by) or awaited <= self._values.keys(), min(timeout_s, threading.TIMEOUT_MAX)
            )
            if not is_over:
                raise BoardTimeout(f"{what} after {timeout_s:g} s")
            if not awaited <= self._values.keys():
                raise MeshBroken(f"{what}: {self._broken_by}")

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until a key has a value on the board, and return the value. Raise the same errors as `wait`."""
        self.wait([key], timeout_s)
        return self._values[key]

    def take(self, key: str, timeout_s: float) -> bytes:
        """Like `get`, but also remove the value from this rank's copy of the board. Other ranks keep their copies."""
        self.wait([key], timeout_s)
        with self._has_changed:
            return self._values.pop(key)

    def exchange(self, topic: str, word: bytes, timeout_s: float) -> list[bytes]:
        """Send a byte string to all ranks. Return every rank's string, in rank order.

        Args:
            topic: Prefix of the keys. Must be the same on all ranks, and different for each call.
            word: This rank's string.
            timeout_s: How long to wait for the string of each rank.
        """
        self.put(f"{topic}/{self._rank}", word)
        return [self.get(f"{topic}/{rank}", timeout_s) for rank in range(self._size)]

    def has(self, keys: Iterable[str]) -> bool:
        """Return True if all keys have values in this rank's copy of the board."""
        return all(key in self._values for key in keys)

    @property
    def values(self) -> list[bytes]:
        """All values in this rank's copy of the board."""
        with self._has_changed:
            return list(self._values.values())

    @property
    def is_broken(self) -> bool:
        """True if a connection to another rank is known to have ended."""
        return bool(self._broken_by)

    def put(self, key: str, value: bytes) -> None:
        """Store a value in this rank's copy of the board, and send it to all other ranks.

        Raises:
            MeshBroken: A connection has ended.
        """
        with self._has_changed:  # send under the lock, so that all ranks see this rank's values in the same order
            self._values[key] = value
            self._has_changed.notify_all()
            self._pass_on([BoardMessage(self._rank, key, value)])

    def _receive(self) -> None:
        try:
            while not self._broken_by:
                self._receive_once()
        except (OSError, ValueError) as error:  # a connection ended, or a message could not be decoded
            was_cut = self._is_cut
            self._cut()
            self._break(_INTERRUPTED if was_cut else str(error))

    def _receive_once(self) -> None:
        """Wait until neighbors take or send bytes. Then forward their messages and store the values.

        Afterwards, raise `MeshBroken` if the connection to a neighbor has ended.
        """
        messages: list[BoardMessage] = []
        ends: list[MeshBroken] = []
        for number, events in self._poll.poll():
            if (link := self._by_number.get(number)) is None:
                os.read(self._bell[0], _PART)
                continue
            try:
                if events & select.POLLOUT:
                    link.send()
                if events & ~select.POLLOUT:
                    messages += link.receive()
            except OSError as error:
                ends.append(MeshBroken(f"rank {link.rank} is gone: {error}"))
        for link in self._links.values():
            self._poll.modify(link.connection, link.awaited_events)
        try:
            self._pass_on(messages)
        finally:
            with self._has_changed:
                self._values |= {message.key: message.value for message in messages}
                self._has_changed.notify_all()
        if ends:
            raise ends[0]

    def _wake(self) -> None:
        os.write(self._bell[1], b"!")

    def _pass_on(self, messages: Sequence[BoardMessage]) -> None:
        """Forward messages to this rank's neighbors. Messages to the same neighbor are sent together."""
        onward: dict[int, list[bytes]] = defaultdict(list)
        for message in messages:
            encoded = message.encoded
            for rank in next_of_all(self._rank, message.source, self._size):
                onward[rank].append(encoded)
        for rank, parts in onward.items():
            try:
                self._links[rank].send(b"".join(parts))
            except OSError as error:
                raise MeshBroken(f"the connection to rank {rank} ended: {error}") from error

    def _break(self, reason: str) -> None:
        with self._has_changed:
            self._broken_by = self._broken_by or reason
            self._has_changed.notify_all()

    def _cut(self) -> None:
        self._is_cut = True
        for link in self._links.values():
            link.cut()

    def interrupt(self) -> None:
        """Shut down this rank's connections. May be called from any thread.

        The shutdown aborts this rank's waits for values. It spreads to all other ranks and aborts their waits, too.
        """
        if not self._is_cut:
            self._cut()
            self._break(_INTERRUPTED)

    def close_sockets(self) -> None:
        """Shut down this rank's connections. Close the sockets once the receiving thread has finished."""
        self.interrupt()
        if self._receiver.is_alive():
            self._receiver.join()
        for link in self._links.values():
            link.close_socket()
        bell, self._bell = self._bell, ()
        for number in bell:
            os.close(number)
