"""Lines: calls of workers on the driver's own node by a socket, in a tenth of the time that Ray takes for a call.

The worker's end of a line is a call of Ray's, `attend`. It ends with the line, so Ray tells of the failure of a worker
as always, and an answer that cannot go by the line goes as its result.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

ARE_POSSIBLE = sys.platform == "linux"  # as are the mesh's sockets without a file, see ADR 55
LARGEST = 1 << 16  # bytes: what a socket takes at once, also where the other end is stopped
_FOREVER_S = 0.1  # without a look at what Ray knows
_SHORTLY_S = 0.002  # where Ray is about to say what became of a worker

_SOCKETS: WeakSet[socket.socket] = WeakSet()


def _new_socket() -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _SOCKETS.add(found)
    return found


def _let_go() -> None:
    for each in _SOCKETS:
        each.close()


os.register_at_fork(after_in_child=_let_go)  # a forked process would keep it open when an end has died


class Line:
    """The driver's end of a line.

    Args:
        attend: Begins the call of Ray's that is the other end; takes an address.

    Attributes:
        attending: Ray's reference to that call.
        was_joined: Whether the worker has found its way to it.
        is_ended: Whether nothing comes by it any more.
    """

    def __init__(self, attend: Callable[[str], Any]) -> None:
        name = f"raysgd-{secrets.token_hex(16)}"
        self._socket = _new_socket()
        self._socket.bind(f"\0{name}")  # no file: it ends with the process
        self._socket.listen()
        self._socket.setblocking(False)
        self.was_joined = self.is_ended = False
        self.attending = attend(name)

    def fileno(self) -> int:
        """Return what can be waited for."""
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Return whether the worker will get it."""
        try:
            self._socket.send(message)
        except OSError:
            self.hang_up()
        return not self.is_ended

    def receive(self) -> bytes | None:
        """Return what the worker has sent, if there is something. Does not wait."""
        try:
            if not self.was_joined and not self._is_joined():
                return None
            message = self._socket.recv(LARGEST)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        if not message:
            self.hang_up()
        return message or None

    def _is_joined(self) -> bool:
        joined, _ = self._socket.accept()
        joined.setblocking(False)
        if not _is_of_same_user(joined):
            joined.close()
            return False
        self._socket.close()
        _SOCKETS.add(joined)
        self._socket, self.was_joined = joined, True
        return True

    def hang_up(self) -> None:
        """Hang up; the worker takes calls of Ray's again."""
        self.is_ended = True
        _hang_up(self._socket)


class LineCall:
    """A call by a line, in the place of Ray's reference to one."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._answer: bytes | None = None

    def fileno(self) -> int:
        """Return what can be waited for."""
        return self.line.fileno()

    @property
    def was_heard(self) -> bool:
        """True unless the worker has not found the line: it is on another node."""
        return self.has_answer or self.line.was_joined

    @property
    def is_answered(self) -> bool:
        """True if an answer that came by the line was found."""
        return self._answer is not None

    @property
    def has_answer(self) -> bool:
        """True if an answer came by the line. Looks for one."""
        if self._answer is None and not self.line.is_ended:
            self._answer = self.line.receive()
        return self._answer is not None

    def answer(self) -> Any:
        """Return the answer that came.

        Raises:
            RaySystemError: It cannot be unpickled, as `ray.get` says it.
        """
        assert self._answer is not None
        try:
            return pickle.loads(self._answer)
        except Exception as error:  # whatever an object of the user raises
            from ray.exceptions import RaySystemError

            raise RaySystemError(error, traceback.format_exc()) from error


class LineEnd:
    """The worker's end of a line.

    Args:
        name: The address of the driver's end.
    """

    def __init__(self, name: str) -> None:
        self._socket = _new_socket()
        try:
            self._socket.connect(f"\0{name}")
            if not _is_of_same_user(self._socket):
                self.hang_up()
        except OSError:  # the driver is on another node
            self.hang_up()

    def answer(self, answer: Any) -> bool:
        """Return whether the driver has got it: not if it is large, or only Ray can send it."""
        try:
            message = pickle.dumps(answer, protocol=5)
        except Exception:  # whatever an object of the user raises
            return False
        with suppress(OSError):
            return len(message) <= LARGEST and self._socket.send(message) > 0
        return False

    def next(self) -> bytes | None:
        """Return the next message of the driver; None if it has hung up."""
        with suppress(OSError):
            return self._socket.recv(LARGEST) or None
        return None

    def hang_up(self) -> None:
        """Hang up."""
        _hang_up(self._socket)


def _hang_up(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)  # also where a process that was forked has it, too
    connected.close()


def _is_of_same_user(connected: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def wait(references: Collection[Any], num_returns: int, timeout_s: float | None) -> list[Any]:
    """Do what `ray.wait` does, also for calls by lines; return those that came to an end."""
    import ray

    calls = [each for each in references if isinstance(each, LineCall)]
    if not calls:
        return list(ray.wait(list(references), num_returns=num_returns, timeout=timeout_s)[0])
    until = None if timeout_s is None else time.monotonic() + timeout_s
    done: set[Any] = {each for each in calls if each.has_answer}
    while len(done) < num_returns:
        left_s = _FOREVER_S if until is None else max(min(until - time.monotonic(), _FOREVER_S), 0.0)
        by_line = [each for each in calls if each not in done and not each.line.is_ended]
        if len(by_line) + len(done) == len(references):  # Ray has nothing to say but that one is lost
            if readable := _readable(by_line, left_s):
                done |= {each for each in readable if each.has_answer}
                continue
            left_s = 0.0
        elif by_line:
            left_s = min(left_s, _SHORTLY_S)
        ended = _ended_for_ray([each for each in references if each not in done], num_returns - len(done), left_s)
        done |= {*ended, *(each for each in by_line if each.has_answer)}
        if until is not None and time.monotonic() >= until:
            break
    return list(done)


def _readable(calls: Sequence[LineCall], timeout_s: float) -> list[LineCall]:
    by_number, poll = {each.fileno(): each for each in calls}, select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(timeout_s * 1000)]


def _ended_for_ray(references: Sequence[Any], num_returns: int, timeout_s: float) -> list[Any]:
    import ray

    asked = {each.line.attending if isinstance(each, LineCall) else each: each for each in references}
    return [asked[found] for found in ray.wait(list(asked), num_returns=num_returns, timeout=timeout_s)[0]]
