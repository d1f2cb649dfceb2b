"""A board: values under keys that all ranks of a group read and write; each rank has a copy.

No death of a rank loses it, as that of a server would. A written value goes to all other ranks, from neighbor to
neighbor. Only what depends on the value before, such as counting, is done by rank 0. Needs only sockets, and a thread
that receives from them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from raysgd.connections.mesh.links import Links, PeerMessage, Received
from raysgd.connections.mesh.mesh import MeshBroken

_PUT, _DELETE, _ADD, _ANSWER = range(4)


class BoardTimeout(MeshBroken):
    """No rank wrote a value in time."""


class Board:
    """One rank's copy.

    Args:
        rank: This rank.
        size: The number of all ranks.
        connections: The socket to each neighbor, see `_routes.py`; nothing else uses them.
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

    def close(self) -> None:
        """Ends the connections and closes their sockets."""
        self._links.close()


def _bounded(timeout_s: float) -> float:
    return min(timeout_s, threading.TIMEOUT_MAX)
