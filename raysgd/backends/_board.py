"""A board on which all ranks of a group read and write, without a place that could be lost: everybody has a copy.

What is put up goes to all others over connections of the board's own. Only what depends on what was there before, such
as counting, is done by rank 0. Needs only sockets, and a thread that listens to them.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from raysgd.backends._mesh import MeshBroken

_HEAD = struct.Struct("<BIIII")  # what it is, the number of the question, and the lengths of what follows
_PUT, _TAKE_DOWN, _ADD, _SWAP, _ANSWER = range(5)
_PART = 1 << 16


class BoardTimeout(MeshBroken):
    """Something was not put up in time."""


class Board:
    """One rank's copy.

    Args:
        rank: Who this is.
        connections: The socket to each other rank; nothing else uses them.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._connections = dict(connections)
        self._notes: dict[str, bytes] = {}
        self._answers: dict[int, bytes] = {}
        self._num_questions = 0
        self._broken_by = ""
        self._has_changed = threading.Condition()
        self._sending = {other: threading.Lock() for other in connections}
        for connection in self._connections.values():
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listening = threading.Thread(target=self._listen, name="raysgd-board", daemon=True)
        if connections:
            self._listening.start()

    # ---------------------------------------------------------------------------------------------- reading

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Until all of these are there.

        Raises:
            BoardTimeout: They are not, for so long.
            MeshBroken: A rank that might put them up is gone.
        """
        self._wait_until(lambda: all(key in self._notes for key in keys), timeout_s, f"for {', '.join(keys)}")

    def get(self, key: str, timeout_s: float) -> bytes:
        """What is written under `key`; waits for it, as `wait` does."""
        self.wait([key], timeout_s)
        return self._notes[key]

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these are there already."""
        return all(key in self._notes for key in keys)

    def __len__(self) -> int:
        return len(self._notes)

    def _wait_until(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._has_changed:
            is_over = self._has_changed.wait_for(lambda: is_done() or bool(self._broken_by), _bounded(timeout_s))
            if not is_over:
                raise BoardTimeout(f"gave up waiting {what} after {timeout_s:g} s")
            if not is_done():
                raise MeshBroken(f"gave up waiting {what}: {self._broken_by}")

    # ---------------------------------------------------------------------------------------------- writing

    def put(self, key: str, note: bytes) -> None:
        """Writes under `key`, for all."""
        self._note(key, note)
        self._tell_all(_PUT, key, note)

    def take_down(self, key: str) -> bool:
        """Removes what is written under `key`, for all; returns whether there was anything here."""
        had = self._note(key, None)
        self._tell_all(_TAKE_DOWN, key)
        return had

    def add(self, key: str, amount: int, timeout_s: float) -> int:
        """Adds to the number under `key`, 0 where there is none, in one step; returns the sum."""
        return int(self._ask(_ADD, key, str(amount).encode(), b"", timeout_s))

    def swap(self, key: str, expected: bytes, wanted: bytes, timeout_s: float) -> bytes:
        """Writes `wanted` if `expected`, or where that is empty nothing, is there; returns what is there then.

        Where nothing is, though something was expected, that is what is returned.
        """
        return self._ask(_SWAP, key, expected, wanted, timeout_s)

    def _ask(self, kind: int, key: str, first: bytes, second: bytes, timeout_s: float) -> bytes:
        if self._rank == 0:
            return self._decide(kind, key, first, second)
        with self._has_changed:
            self._num_questions += 1
            question = self._num_questions
        self._tell(0, kind, key, first, second, question)
        self._wait_until(lambda: question in self._answers, timeout_s, "for an answer of rank 0")
        return self._answers.pop(question)

    def _decide(self, kind: int, key: str, first: bytes, second: bytes) -> bytes:
        """On rank 0: changes what depends on what is there, and tells all."""
        with self._has_changed:
            before = self._notes.get(key)
            after, answer = _added(before, first) if kind == _ADD else _swapped(before, first, second)
            if after is not None:
                self._notes[key] = after
                self._has_changed.notify_all()
            if after is not None:  # in the order of the changes
                self._tell_all(_PUT, key, after)
        return answer

    def _note(self, key: str, note: bytes | None) -> bool:
        with self._has_changed:
            had = key in self._notes
            if note is None:
                self._notes.pop(key, None)
            else:
                self._notes[key] = note
            self._has_changed.notify_all()
        return had

    def _tell_all(self, kind: int, key: str, first: bytes = b"", second: bytes = b"") -> None:
        for other in self._connections:
            self._tell(other, kind, key, first, second)

    def _tell(self, other: int, kind: int, key: str, first: bytes, second: bytes, question: int = 0) -> None:
        name = key.encode()
        message = _HEAD.pack(kind, question, len(name), len(first), len(second)) + name + first + second
        try:
            with self._sending[other]:
                self._connections[other].sendall(message)
        except OSError as error:
            raise MeshBroken(f"the connection to rank {other} ended: {error}") from error

    # ---------------------------------------------------------------------------------------------- listening

    def _listen(self) -> None:
        poll = select.poll()
        others = {connection.fileno(): other for other, connection in self._connections.items()}
        heard = {number: bytearray() for number in others}
        for number in others:
            poll.register(number, select.POLLIN)
        while not self._broken_by:
            for number, _ in poll.poll():
                try:
                    part = self._connections[others[number]].recv(_PART)
                    if not part:
                        raise ConnectionError("it has left")
                    heard[number] += part
                    self._take_in(others[number], heard[number])
                except OSError as error:
                    self._break(f"rank {others[number]} is gone: {error}")
                    return

    def _take_in(self, other: int, heard: bytearray) -> None:
        """All whole messages of another rank."""
        while len(heard) >= _HEAD.size:
            kind, question, *lengths = _HEAD.unpack_from(heard)
            end = _HEAD.size + sum(lengths)
            if len(heard) < end:
                return
            body, start = bytes(heard[_HEAD.size : end]), 0
            parts = []
            for length in lengths:
                parts.append(body[start : start + length])
                start += length
            del heard[:end]
            self._obey(other, kind, question, parts[0].decode(), parts[1], parts[2])

    def _obey(self, other: int, kind: int, question: int, key: str, first: bytes, second: bytes) -> None:
        if kind in (_PUT, _TAKE_DOWN):
            self._note(key, first if kind == _PUT else None)
        elif kind == _ANSWER:
            with self._has_changed:
                self._answers[question] = first
                self._has_changed.notify_all()
        else:
            self._tell(other, _ANSWER, key, self._decide(kind, key, first, second), b"", question)

    # ---------------------------------------------------------------------------------------------- the end

    def _break(self, reason: str) -> None:
        with self._has_changed:
            self._broken_by = self._broken_by or reason
            self._has_changed.notify_all()

    def interrupt(self) -> None:
        """From any thread: ends all connections, and with them all waiting here and for this rank."""
        for connection in self._connections.values():
            with suppress(OSError):  # ended already
                connection.shutdown(socket.SHUT_RDWR)
        self._break("it was interrupted")

    def close(self) -> None:
        """Ends the connections and gives their sockets back."""
        self.interrupt()
        if self._listening.is_alive():
            self._listening.join()
        for connection in self._connections.values():
            connection.close()


def _added(before: bytes | None, amount: bytes) -> tuple[bytes, bytes]:
    after = str(int(before or b"0") + int(amount)).encode()
    return after, after


def _swapped(before: bytes | None, expected: bytes, wanted: bytes) -> tuple[bytes | None, bytes]:
    if before == expected or (before is None and not expected):
        return wanted, wanted
    return None, expected if before is None else before


def _bounded(timeout_s: float) -> float:
    return min(timeout_s, threading.TIMEOUT_MAX)
