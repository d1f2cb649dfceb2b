"""Messages between ranks over connections of their own, sent from any thread and received in one."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from raysgd.connections._mesh import MeshBroken

_HEAD = struct.Struct("<BIIII")  # the kind, the number of the request, and the lengths of what follows
_PART = 1 << 16


@dataclass(frozen=True)
class Message:
    """What one rank sends to another.

    Attributes:
        kind: A number that the receiver knows.
        key: What it is about.
        first: Some bytes.
        second: More of them.
        request: The number of the request that this makes or answers; 0 for none.
    """

    kind: int
    key: str
    first: bytes = b""
    second: bytes = b""
    request: int = 0

    def encoded(self) -> bytes:
        """As it travels."""
        parts = (self.key.encode(), self.first, self.second)
        return _HEAD.pack(self.kind, self.request, *map(len, parts)) + b"".join(parts)

    @classmethod
    def taken_from(cls, received: bytearray) -> Message | None:
        """Removes the first message of what was received; None if it is not complete yet."""
        if len(received) < _HEAD.size:
            return None
        kind, request, *lengths = _HEAD.unpack_from(received)
        end = _HEAD.size + sum(lengths)
        if len(received) < end:
            return None
        body = memoryview(bytes(received[_HEAD.size : end]))
        del received[:end]
        parts = []
        for length in lengths:
            parts.append(bytes(body[:length]))
            body = body[length:]
        return cls(kind, parts[0].decode(), parts[1], parts[2], request)


class Links:
    """The connections of one rank.

    Args:
        connections: The socket to each other rank; nothing else uses them.
        on_message: Called in the receiving thread with the sender's rank and the message.
        on_end: Called with the reason when a connection ends, which ends all of them.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        on_message: Callable[[int, Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._connections = dict(connections)
        self._on_message, self._on_end = on_message, on_end
        self._is_ended = False
        self._is_cut = False
        self._sending = {rank: threading.Lock() for rank in connections}
        for connection in self._connections.values():
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._receiver = threading.Thread(target=self._receive, name="raysgd-board", daemon=True)

    def start(self) -> None:
        """Starts to receive."""
        if self._connections:
            self._receiver.start()

    def send(self, rank: int, message: Message) -> None:
        """Sends to one rank.

        Raises:
            MeshBroken: The connection has ended.
        """
        self._send(rank, message.encoded())

    def _send(self, rank: int, encoded: bytes) -> None:
        try:
            with self._sending[rank]:
                self._connections[rank].sendall(encoded)
        except OSError as error:
            raise MeshBroken(f"the connection to rank {rank} ended: {error}") from error

    def send_to_all(self, message: Message) -> None:
        """Sends to all other ranks.

        Raises:
            MeshBroken: A connection has ended.
        """
        encoded = message.encoded()
        for rank in self._connections:
            self._send(rank, encoded)

    def _receive(self) -> None:
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        received = {number: bytearray() for number in ranks}
        for number in ranks:
            poll.register(number, select.POLLIN)
        while not self._is_ended:
            for number, _ in poll.poll():
                try:
                    self._receive_from(ranks[number], received[number])
                except OSError as error:
                    self._end(f"rank {ranks[number]} is gone: {error}")
                    return

    def _receive_from(self, rank: int, received: bytearray) -> None:
        part = self._connections[rank].recv(_PART)
        if not part:
            raise ConnectionError("it has left")
        received += part
        while (message := Message.taken_from(received)) is not None:
            self._on_message(rank, message)

    def _end(self, reason: str) -> None:
        self._is_ended = True
        self._on_end(reason)

    def interrupt(self) -> None:
        """From any thread: ends all connections."""
        if self._is_cut:
            return
        self._is_cut = True
        for connection in self._connections.values():
            with suppress(OSError):  # ended already
                connection.shutdown(socket.SHUT_RDWR)
        self._end("it was interrupted")

    def close(self) -> None:
        """Ends the connections, and closes their sockets once nothing is received any more."""
        self.interrupt()
        if self._receiver.is_alive():
            self._receiver.join()
        for connection in self._connections.values():
            connection.close()
