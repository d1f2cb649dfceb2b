"""Messages between ranks over connections of their own, sent from any thread and received in one.

A rank is connected to its neighbors only, and passes on what is for others; see `_routes.py`. No thread waits for a
connection that takes no more: what is left is kept, and sent by the receiving thread.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from raysgd.connections.mesh.mesh import MeshBroken
from raysgd.connections.mesh.routes import next_of_all, next_of_one

_HEAD = struct.Struct("<iiBIII")  # source, destination, kind, number of the request, and the lengths of key and value
_ALL = -1
_PART = 1 << 16


class PeerMessage(NamedTuple):
    """A message from one rank to another.

    Attributes:
        kind: A number that the receiver knows.
        key: What it is about.
        value: Some bytes.
        request: The number of the request that this makes or answers; 0 for none.
    """

    kind: int
    key: str
    value: bytes = b""
    request: int = 0


class RoutedMessage(NamedTuple):
    """A message as it travels.

    Attributes:
        source: The rank that sent it.
        destination: The rank that it is for; -1 for all.
        encoded: All of it.
    """

    source: int
    destination: int
    encoded: bytes

    @classmethod
    def of(cls, source: int, message: PeerMessage, destination: int = _ALL) -> RoutedMessage:
        """A message of `source`; to all, unless it is for one rank."""
        kind, key, value, request = message
        name = key.encode()
        head = _HEAD.pack(source, destination, kind, request, len(name), len(value))
        return cls(source, destination, b"".join((head, name, value)))

    @property
    def message(self) -> PeerMessage:
        """The message without its way."""
        _, _, kind, request, length, _ = _HEAD.unpack_from(self.encoded)
        start = _HEAD.size + length
        return PeerMessage(kind, self.encoded[_HEAD.size : start].decode(), self.encoded[start:], request)


def taken_from(received: bytearray) -> list[RoutedMessage]:
    """Removes the letters that are complete from what was received."""
    letters, start, num_received = [], 0, len(received)
    while num_received - start >= _HEAD.size:
        source, destination, _, _, *lengths = _HEAD.unpack_from(received, start)
        end = start + _HEAD.size + sum(lengths)
        if end > num_received:
            break
        letters.append(RoutedMessage(source, destination, bytes(received[start:end])))
        start = end
    del received[:start]
    return letters


Received: TypeAlias = Sequence[tuple[int, PeerMessage]]
"""Messages with the ranks that sent them, in the order in which they came."""


class _Link:
    """The connection to one neighbor.

    Args:
        rank: The neighbor's.
        connection: The socket.
        wake: Called where something is left to send and nothing was before.
    """

    __slots__ = ("_is_cut", "_received", "_sending", "_unsent", "_wake", "connection", "rank")

    def __init__(self, rank: int, connection: socket.socket, wake: Callable[[], None]) -> None:
        connection.setblocking(False)
        self.rank, self.connection, self._wake = rank, connection, wake
        self._received, self._unsent = bytearray(), bytearray()
        self._sending = threading.Lock()
        self._is_cut = False

    def send(self, data: bytes) -> None:
        """Sends as much as the connection takes now, and keeps the rest."""
        with self._sending:
            if self._unsent and not self._is_cut:
                self._unsent += data
            elif rest := data[self._num_sent(data) :]:
                self._unsent += rest
                self._wake()

    def send_rest(self) -> None:
        """Sends more of what was kept."""
        with self._sending:
            del self._unsent[: self._num_sent(self._unsent)]

    def _num_sent(self, data: bytes | bytearray) -> int:
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0

    @property
    def has_rest(self) -> bool:
        """True if something is left to send."""
        return bool(self._unsent)

    def receive(self) -> list[RoutedMessage]:
        """Return what is complete now."""
        part = self.connection.recv(_PART)
        if not part:
            raise ConnectionError("it has left, or has lost another rank")
        self._received += part
        return taken_from(self._received)

    def cut(self) -> None:
        """From any thread: ends the connection."""
        self._is_cut = True
        with suppress(OSError):  # ended already
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket; `wake` is not called any more."""
        with self._sending:
            self.connection.close()


class Links:
    """The connections of one rank. Where one ends, all do, so that ranks which are not its neighbors learn of it.

    Args:
        rank: This rank.
        size: The number of all ranks.
        connections: The socket to each neighbor; nothing else uses them.
        on_messages: Called in the receiving thread with what came together.
        on_end: Called with the reason when a connection ends.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, socket.socket],
        on_messages: Callable[[Received], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._rank, self._size = rank, size
        self._on_messages, self._on_end = on_messages, on_end
        self._is_ended = False
        self._is_cut = False
        self._bell: tuple[int, ...] = os.pipe() if connections else ()  # its second end wakes the receiving thread
        self._links = {rank: _Link(rank, each, self._wake) for rank, each in connections.items()}
        self._by_number = {link.connection.fileno(): link for link in self._links.values()}
        self._poll = select.poll()
        for number in (*self._by_number, *self._bell[:1]):
            self._poll.register(number, select.POLLIN)
        self._receiver = threading.Thread(target=self._receive, name="raysgd-board", daemon=True)

    def start(self) -> None:
        """Starts to receive."""
        if self._links:
            self._receiver.start()

    def send(self, rank: int, message: PeerMessage) -> None:
        """Sends to one rank, another one.

        Raises:
            MeshBroken: The connection has ended.
        """
        self._send(RoutedMessage.of(self._rank, message, rank))

    def send_to_all(self, message: PeerMessage) -> None:
        """Sends to all other ranks.

        Raises:
            MeshBroken: A connection has ended.
        """
        self._send(RoutedMessage.of(self._rank, message))

    def _send(self, letter: RoutedMessage) -> None:
        for rank in self._next_of(letter):
            try:
                self._links[rank].send(letter.encoded)
            except OSError as error:
                raise MeshBroken(f"the connection to rank {rank} ended: {error}") from error

    def _next_of(self, letter: RoutedMessage) -> Sequence[int]:
        if letter.destination == _ALL:
            return next_of_all(self._rank, letter.source, self._size)
        if letter.destination == self._rank:
            return ()
        return (next_of_one(self._rank, letter.destination, self._size),)

    def _receive(self) -> None:
        try:
            while not self._is_ended:
                self._receive_once()
        except (OSError, ValueError) as error:  # a connection ended, or something came that no rank sends
            was_cut = self._is_cut
            self._cut()
            self._end(_INTERRUPTED if was_cut else str(error))

    def _receive_once(self) -> None:
        """Waits for something, passes on what is for others too, and hands the rest over; only then tells of an end."""
        letters: list[RoutedMessage] = []
        ends: list[MeshBroken] = []
        for number, events in self._poll.poll():
            if (link := self._by_number.get(number)) is None:
                self._watch_rests()
                continue
            try:
                letters += self._moved(link, events)
            except OSError as error:
                ends.append(MeshBroken(f"rank {link.rank} is gone: {error}"))
        try:
            self._pass_on(letters)
        finally:
            self._hand_over(letters)
        if ends:
            raise ends[0]

    def _moved(self, link: _Link, events: int) -> list[RoutedMessage]:
        """Sends to a neighbor and receives from it, each where it goes; returns what was received."""
        if events & select.POLLOUT:
            link.send_rest()
            self._poll.modify(link.connection, _events(link))
        return link.receive() if events & ~select.POLLOUT else []

    def _watch_rests(self) -> None:
        """From now on, also waits until neighbors take more of what is left for them."""
        os.read(self._bell[0], _PART)
        for link in self._links.values():
            self._poll.modify(link.connection, _events(link))

    def _wake(self) -> None:
        os.write(self._bell[1], b"!")

    def _pass_on(self, letters: Sequence[RoutedMessage]) -> None:
        """Sends on what has not reached all that it is for; what takes the same way, in one go."""
        onward: dict[int, list[bytes]] = defaultdict(list)
        for letter in letters:
            for rank in self._next_of(letter):
                onward[rank].append(letter.encoded)
        for rank, parts in onward.items():
            try:
                self._links[rank].send(b"".join(parts))
            except OSError as error:
                raise MeshBroken(f"rank {rank} is gone: {error}") from error

    def _hand_over(self, letters: Sequence[RoutedMessage]) -> None:
        if own := [(each.source, each.message) for each in letters if each.destination in (_ALL, self._rank)]:
            self._on_messages(own)

    def _end(self, reason: str) -> None:
        self._is_ended = True
        self._on_end(reason)

    def _cut(self) -> None:
        self._is_cut = True
        for link in self._links.values():
            link.cut()

    def interrupt(self) -> None:
        """From any thread: ends all connections."""
        if self._is_cut:
            return
        self._cut()
        self._end(_INTERRUPTED)

    def close(self) -> None:
        """Ends the connections, and closes their sockets once nothing is received any more."""
        self.interrupt()
        if self._receiver.is_alive():
            self._receiver.join()
        for link in self._links.values():
            link.close()
        bell, self._bell = self._bell, ()
        for number in bell:
            os.close(number)


_INTERRUPTED = "it was interrupted"


def _events(link: _Link) -> int:
    return select.POLLIN | (select.POLLOUT if link.has_rest else 0)
