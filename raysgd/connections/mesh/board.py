"""A board: values under keys that all ranks of a group read and write; each rank has a copy.

No death of a rank loses it, as that of a server would. A written value goes to all other ranks, from neighbor to
neighbor: `Links` pass on what is for others. Only what depends on the value before, such as counting, is done by rank
0. Needs only sockets, and a thread that receives from them and sends what a connection did not take at once.
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
from typing import NamedTuple, TypeAlias

from raysgd.connections.mesh.mesh import MeshBroken

_PUT, _DELETE, _ADD, _ANSWER = range(4)


_HEAD = struct.Struct("<iiBIII")  # source, destination, kind, number of the request, and the lengths of key and value
_ALL = -1
_PART = 1 << 16
_INTERRUPTED = "it was interrupted"


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
    def from_rank(cls, source: int, message: PeerMessage, destination: int = _ALL) -> RoutedMessage:
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
    """Removes the messages that are complete from what was received."""
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

    def close_socket(self) -> None:
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
        self._send(RoutedMessage.from_rank(self._rank, message, rank))

    def send_to_all(self, message: PeerMessage) -> None:
        """Sends to all other ranks.

        Raises:
            MeshBroken: A connection has ended.
        """
        self._send(RoutedMessage.from_rank(self._rank, message))

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

    def close_sockets(self) -> None:
        """Ends the connections, and closes their sockets once nothing is received any more."""
        self.interrupt()
        if self._receiver.is_alive():
            self._receiver.join()
        for link in self._links.values():
            link.close_socket()
        bell, self._bell = self._bell, ()
        for number in bell:
            os.close(number)


def _events(link: _Link) -> int:
    return select.POLLIN | (select.POLLOUT if link.has_rest else 0)


def others(rank: int, size: int) -> set[int]:
    """All ranks but this one."""
    return set(range(size)) - {rank}


def neighbors(rank: int, size: int) -> set[int]:
    """Return the ranks that this one has a connection to: the way round to them is a power of two.

    So of N ranks each has about 2 log2 N neighbors, and no message is passed on more than log2 N times.
    """
    steps = [1 << power for power in range((size - 1).bit_length())]
    return {(rank + step) % size for step in steps} | {(rank - step) % size for step in steps}


def next_of_all(rank: int, source: int, size: int) -> list[int]:
    """Return where a rank sends what `source` says to all: the neighbors that have it from no other rank."""
    distance = (rank - source) % size
    powers = range(distance.bit_length(), (size - 1).bit_length())
    return [(rank + (1 << power)) % size for power in powers if distance + (1 << power) < size]


def next_of_one(rank: int, destination: int, size: int) -> int:
    """Return where a rank sends what is for `destination`: as the same source's messages to all go there.

    So messages of one rank reach another one in the order in which they were sent, those to all and those to one.

    Raises:
        ValueError: It is there already.
    """
    distance = (destination - rank) % size
    if not distance:
        raise ValueError(f"a message for rank {destination} of {size} came back to rank {rank}")
    return (rank + (distance & -distance)) % size


class BoardTimeout(MeshBroken):
    """No rank wrote a value in time."""


class Board:
    """One rank's copy.

    Args:
        rank: This rank.
        size: The number of all ranks.
        connections: The socket to each neighbor, see `neighbors`; nothing else uses them.
    """

    def __init__(self, rank: int, size: int, connections: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._values: dict[str, bytes] = {}
        self._answers: dict[int, bytes] = {}
        self._num_requests = 0
        self._broken_by = ""
        self._has_changed = threading.Condition()
        self._links = Links(rank, size, connections, self._handle, self._break)
        self._links.start()

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Until all of these have values.

        Raises:
            BoardTimeout: They have none after that time.
            MeshBroken: A rank that might write them is gone.
        """
        if not self.has(keys):
            awaited = set(keys)
            self._wait_until(lambda: awaited <= self._values.keys(), timeout_s, f"for {', '.join(keys)}")

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value under `key`; waits for it, as `wait` does."""
        self.wait([key], timeout_s)
        return self._values[key]

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all of these have values."""
        return all(key in self._values for key in keys)

    def __len__(self) -> int:
        return len(self._values)

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._has_changed:
            is_over = self._has_changed.wait_for(lambda: bool(self._broken_by) or is_done(), _bounded(timeout_s))
            if not is_over:
                raise BoardTimeout(f"gave up waiting {what} after {timeout_s:g} s")
            if not is_done():
                raise MeshBroken(f"gave up waiting {what}: {self._broken_by}")

    def put(self, key: str, value: bytes) -> None:
        """Writes under `key`, for all."""
        self._write(PeerMessage(_PUT, key, value))

    @property
    def values(self) -> list[bytes]:
        """All that stands on it now."""
        with self._has_changed:
            return list(self._values.values())

    def delete(self, key: str) -> bool:
        """Removes `key` for all; returns whether it had a value here."""
        return self._write(PeerMessage(_DELETE, key))

    def _write(self, message: PeerMessage) -> bool:
        """Returns whether there was a value before."""
        with self._has_changed:  # sent under the lock: all see the changes of one rank in the same order
            had = message.key in self._values
            self._set(message)
            self._has_changed.notify_all()
            self._links.send_to_all(message)
        return had

    def add(self, key: str, amount: int, timeout_s: float) -> int:
        """Adds to the number under `key`, 0 if there is none, in one step; returns the sum."""
        number = str(amount).encode()
        if self._rank == 0:
            return int(self._added(key, number))
        with self._has_changed:
            self._num_requests += 1
            request = self._num_requests
        self._links.send(0, PeerMessage(_ADD, key, number, request))
        self._wait_until(lambda: request in self._answers, timeout_s, "for an answer of rank 0")
        return int(self._answers.pop(request))

    def _added(self, key: str, amount: bytes) -> bytes:
        """Adds, on rank 0, to a number, and sends the sum to all; returns it."""
        with self._has_changed:
            total = str(int(self._values.get(key, b"0")) + int(amount)).encode()
            self._write(PeerMessage(_PUT, key, total))
        return total

    def _set(self, message: PeerMessage) -> None:
        if message.kind == _PUT:
            self._values[message.key] = message.value
        else:
            self._values.pop(message.key, None)

    def _handle(self, received: Received) -> None:
        with self._has_changed:
            for rank, message in received:
                self._handle_one(rank, message)
            self._has_changed.notify_all()

    def _handle_one(self, rank: int, message: PeerMessage) -> None:
        if message.kind in (_PUT, _DELETE):
            self._set(message)
        elif message.kind == _ANSWER:
            self._answers[message.request] = message.value
        else:
            total = self._added(message.key, message.value)
            self._links.send(rank, PeerMessage(_ANSWER, message.key, total, message.request))

    def _break(self, reason: str) -> None:
        with self._has_changed:
            self._broken_by = self._broken_by or reason
            self._has_changed.notify_all()

    def interrupt(self) -> None:
        """From any thread: ends all connections, and with them all waits here and for this rank."""
        self._links.interrupt()

    def close_sockets(self) -> None:
        """Ends the connections and closes their sockets."""
        self._links.close_sockets()


def _bounded(timeout_s: float) -> float:
    return min(timeout_s, threading.TIMEOUT_MAX)
