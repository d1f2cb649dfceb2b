"""The mesh: sockets between all pairs of ranks, through which ranks send and receive bytes.

Its only operation is a swap: a rank sends messages to some ranks and receives messages from some ranks at the same
time. The swaps of all ranks must match: a rank receives another rank's messages in the order in which they are sent. An
error in a swap shuts down all of this rank's connections, so that no other rank waits for this rank. `interrupt` shuts
them down, too, and may be called from any thread.

ADR 35 explains why gradients in host memory do not use gloo.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from raysgd.exceptions import OnFailure

_HEAD = struct.Struct("<QI")  # header of a message: number of bytes that follow, and type of the collective
_LONGEST_POLL_MS = 2**31 - 1

# Poll event for a closed connection. It exists on Linux only. Elsewhere, the next use of the connection fails.
_IS_GONE = getattr(select, "POLLRDHUP", 0)

Bytes: TypeAlias = memoryview

Message: TypeAlias = Bytes | tuple[Bytes, ...]
"""The message from one rank to another in a swap: one buffer, or several buffers to send one after the other."""


class MeshBroken(ConnectionError):
    """A connection to another rank ended or timed out."""


class NotAligned(ValueError):
    """Another rank is in a different collective. All ranks must call the same collectives in the same order."""


class Mesh:
    """One rank's connections to all other ranks.

    In a swap, ranks send and receive messages through these connections at the same time.

    Attributes:
        timeout_s: How many seconds a swap may go without sending or receiving a byte before it raises.
        waited_s: Seconds that this rank has waited in swaps until other ranks started the same swap.
    """

    def __init__(self, connections: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._connections = dict(connections)
        self.timeout_s = timeout_s
        self._is_broken = False
        self.waited_s = 0.0
        self._poll, self._ranks = select.poll(), {}
        for rank, connection in self._connections.items():
            connection.setblocking(False)
            self._poll.register(connection, _IS_GONE)
            self._ranks[connection.fileno()] = rank

    def swap(self, outgoing: Mapping[int, Message], incoming: Mapping[int, Message], kind: int = 0) -> None:
        """Send messages to some ranks and receive messages from some ranks, all at the same time.

        Args:
            outgoing: Messages to send, by rank.
            incoming: Receive buffers, by rank. Each must have the size of that rank's message.
            kind: Identifies the type of collective. All ranks must pass the same number.

        Raises:
            MeshBroken: A connection ended, or no byte was sent or received for `timeout_s`.
            NotAligned: A rank sent a message of another size or `kind`, so it is in a different collective.
        """
        if self._is_broken:
            raise MeshBroken("the connections to the other ranks have ended")
        try:
            with OnFailure(self.interrupt):
                self._move(
                    {rank: _Sending(self._connections[rank], _pieces(each), kind) for rank, each in outgoing.items()},
                    {rank: _Receiving(self._connections[rank], rank, _pieces(e), kind) for rank, e in incoming.items()},
                )
        except MeshBroken:
            raise
        except OSError as error:
            raise MeshBroken(f"the connection to another rank ended: {error}") from error

    def _move(self, sending: dict[int, _Sending], receiving: dict[int, _Receiving]) -> None:
        while True:
            has_moved = _go_on(sending) | _go_on(receiving)
            if not sending and not receiving:
                return
            if not has_moved:
                began, is_early = time.perf_counter(), any(not task.has_begun for task in receiving.values())
                self._wait(sending, receiving)
                self.waited_s += time.perf_counter() - began if is_early else 0.0

    def _wait(self, sending: Collection[int], receiving: Collection[int]) -> None:
        # Watch all connections, even to ranks from which this rank expects no message. If such a rank has closed its
        # connection, it will not take part in the next swap, and other ranks might wait for it forever.
        awaited = {*sending, *receiving}
        for rank in awaited:
            events = select.POLLIN if rank in receiving else _IS_GONE
            self._watch(rank, events | (select.POLLOUT if rank in sending else 0))
        ready = self._poll.poll(min(self.timeout_s * 1000, _LONGEST_POLL_MS))
        for rank in awaited:
            self._watch(rank, _IS_GONE)
        if not ready:
            late = ", ".join(map(str, sorted(awaited)))
            raise MeshBroken(f"rank {late} did not answer within {self.timeout_s:g} s")
        found = [(self._ranks[number], event) for number, event in ready]
        gone = [rank for rank, event in found if rank not in receiving and event & ~select.POLLOUT]
        if len(gone) == len(ready):
            raise MeshBroken(f"rank {', '.join(map(str, sorted(gone)))} has ended its connection")

    def _watch(self, rank: int, events: int) -> None:
        """Set the poll events that `_wait` watches for on the connection to a rank."""
        try:
            self._poll.modify(self._connections[rank], events)
        except ValueError as error:
            raise MeshBroken("the connections to the other ranks were closed") from error

    @property
    def is_broken(self) -> bool:
        """True if any connection to another rank has ended."""
        if self._is_broken:
            return True
        poll = select.poll()  # a new poll object, because another thread may be waiting in `self._poll`
        for connection in self._connections.values():
            poll.register(connection, _IS_GONE)
        return bool(poll.poll(0))

    def interrupt(self) -> None:
        """Shut down this rank's connections. May be called from any thread.

        The shutdown aborts this rank's swaps, and other ranks' swaps with this rank.
        """
        if self._is_broken:
            return
        self._is_broken = True
        for connection in self._connections.values():
            with suppress(OSError):  # the connection may have ended already
                connection.shutdown(socket.SHUT_RDWR)

    def close_sockets(self) -> None:
        """Shut down the connections and close their sockets."""
        self.interrupt()
        for connection in self._connections.values():
            connection.close()


def _pieces(message: Message) -> list[Any]:
    return list(message) if isinstance(message, tuple) else [message]


def _go_on(tasks: dict[int, _TaskT]) -> bool:
    """Send or receive as much as possible in each task without blocking, and remove finished tasks.

    Return True if any task sent or received bytes.
    """
    has_moved = False
    for rank, task in list(tasks.items()):
        has_moved |= task.go_on()
        if task.is_done:
            del tasks[rank]
    return has_moved


class _Sending:
    """Sends one message of a swap to one rank without blocking: first the header, then the body."""

    __slots__ = ("_connection", "_parts", "is_done")

    def __init__(self, connection: socket.socket, pieces: list[Any], kind: int) -> None:
        self._connection = connection
        self._parts: list[Any] = [_HEAD.pack(sum(map(len, pieces)), kind), *pieces]
        self.is_done = False

    def go_on(self) -> bool:
        """Send as much as possible without blocking. Return True if any bytes were sent."""
        try:
            num_sent = self._connection.sendmsg(self._parts)
        except BlockingIOError:
            return False
        self._parts = list(_rest_of(self._parts, num_sent))
        self.is_done = not self._parts
        return True


class _Receiving:
    """Receives one message of a swap from one rank without blocking: first the header, then the body."""

    __slots__ = ("_connection", "_head", "_kind", "_parts", "_rank", "is_done")

    def __init__(self, connection: socket.socket, rank: int, pieces: list[Any], kind: int) -> None:
        self._connection, self._rank, self._parts, self._kind = connection, rank, pieces, kind
        self._head: bytes | None = b""
        self.is_done = False

    @property
    def has_begun(self) -> bool:
        """True if the message's header has arrived. The other rank has then started the same swap."""
        return self._head is None

    def go_on(self) -> bool:
        try:
            return self._receive_head() if self._head is not None else self._receive_body()
        except BlockingIOError:
            return False

    def _receive_head(self) -> bool:
        assert self._head is not None
        self._head += self._nonempty(self._connection.recv(_HEAD.size - len(self._head)))
        if len(self._head) == _HEAD.size:
            length, kind = _HEAD.unpack(self._head)
            expected = sum(map(len, self._parts))
            if (length, kind) != (expected, self._kind):
                what = "bytes" if kind == self._kind else "bytes of another kind"
                raise NotAligned(
                    f"rank {self._rank} sends {length} {what} where this rank expects {expected}: the ranks are "
                    "not at the same exchange. All of them have to average the same gradients in the same order."
                )
            self._head = None
            self.is_done = not length
        return True

    def _receive_body(self) -> bool:
        num_received = self._nonempty(self._connection.recvmsg_into(self._parts)[0])
        self._parts = list(_rest_of(self._parts, num_received))
        self.is_done = not self._parts
        return True

    def _nonempty(self, received: Any) -> Any:
        if not received:
            raise MeshBroken(f"rank {self._rank} is gone: it has ended its connection")
        return received


_TaskT = TypeVar("_TaskT", _Sending, _Receiving)


def _rest_of(parts: Sequence[Any], num_sent: int) -> Iterator[Any]:
    """Yield the parts of a message that remain after its first `num_sent` bytes."""
    for part in parts:
        if num_sent < len(part):
            yield memoryview(part)[num_sent:]
        num_sent = max(0, num_sent - len(part))
