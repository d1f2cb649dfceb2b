"""Lines: Unix sockets over which the driver calls a worker on the same node.

A call over a line takes a tenth of the time of a Ray call. To open a line, the driver makes one Ray call to the
worker's method `attend`. This method runs the first call, which is its argument, and then the calls that arrive on the
socket, until the socket closes. It sends the answers over the socket. If the worker dies, Ray reports that the `attend`
call failed, so the driver notices the death as usual. If a call fails, or its answer cannot be sent over the line,
`attend` ends and passes the failure or the answer on through Ray.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import wait as wait_for_sockets
from typing import Any, TypeAlias
from weakref import WeakSet

ARE_POSSIBLE = sys.platform == "linux"  # only Linux has socket addresses that need no file; see ADR 55
LARGEST = 1 << 16  # largest message in bytes; the socket buffers it even if the receiving process is suspended
_FOREVER_S = 0.1  # longest wait for answers on sockets before the next check whether a Ray call has failed
_SHORTLY_S = 0.002  # longest wait for Ray calls while answers may also arrive on sockets

Reference: TypeAlias = object
"""A call to a remote worker: a `Line`, for the last call over it, or a Ray object reference."""

_SOCKETS: WeakSet[socket.socket] = WeakSet()


def _new_socket() -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _SOCKETS.add(line)
    return line


def _let_go() -> None:
    for each in _SOCKETS:
        each.close()


# A forked child would otherwise keep the sockets open after this process has died.
os.register_at_fork(after_in_child=_let_go)


class Line:
    """The driver's end of a line, a Unix socket to one worker. It also stands for the last call over the line.

    `wait` accepts such calls as well as Ray object references.

    Args:
        attend: Starts the Ray call in which the worker connects to the socket and answers calls. Takes the socket's
            address.

    Attributes:
        attending: Ray's reference to the call that `attend` started.
        was_joined: True once `has_answer` has seen the worker connect. A worker on another node can never connect.
        is_ended: True once the driver has closed the socket or noticed that the worker has closed it.
    """

    def __init__(self, attend: Callable[[str], Reference]) -> None:
        name = f"raysgd-{secrets.token_hex(16)}"
        self._socket = _new_socket()
        self._socket.bind(f"\0{name}")  # an abstract address: it has no file and disappears with the process
        self._socket.listen()
        self._socket.setblocking(False)
        self.was_joined = self.is_ended = False
        self._answer: bytes | None = None
        self.attending = attend(name)

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Send the next call without blocking, and forget the last answer.

        If this fails, close the socket and return False.
        """
        try:
            self._socket.send(message)
            self._answer = None
        except OSError:
            self.hang_up()
        return not self.is_ended

    @property
    def is_answered(self) -> bool:
        """True if the worker's answer has already been read from the socket.

        This property does not read from the socket.
        """
        return self._answer is not None

    @property
    def has_answer(self) -> bool:
        """True if the worker's answer has arrived. If so, this property also reads the answer from the socket."""
        if self._answer is None and not self.is_ended:
            self._answer = self._receive()
        return self._answer is not None

    def answer(self) -> Any:
        """Return the worker's answer. Call this method only after `has_answer` was True.

        Raises:
            RaySystemError: The answer cannot be unpickled. `ray.get` raises the same error.
        """
        assert self._answer is not None
        try:
            return pickle.loads(self._answer)
        except Exception as error:  # unpickling an object of the user may raise anything
            from ray.exceptions import RaySystemError

            raise RaySystemError(error, traceback.format_exc()) from error

    def _receive(self) -> bytes | None:
        """Return the worker's next message, or None if no message has arrived or the worker has closed the socket.

        This method does not block.
        """
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
        """Close the socket. The worker's `attend` call then returns, which frees the worker to run other Ray calls."""
        self.is_ended = True
        _hang_up(self._socket)


class LineEnd:
    """The worker's end of a line, a Unix socket to the driver.

    Args:
        name: Address of the driver's end.
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
        """Send the answer of a call to the driver.

        Return False if the answer is too large or cannot be pickled, or if the driver cannot be reached or has closed
        the socket.
        """
        try:
            message = pickle.dumps(answer, protocol=5)
        except Exception:  # pickling an object of the user may raise anything
            return False
        with suppress(OSError):
            return len(message) <= LARGEST and self._socket.send(message) > 0
        return False

    def next(self) -> bytes | None:
        """Wait for the driver's next message and return it.

        Return None if the driver cannot be reached or has closed the socket.
        """
        with suppress(OSError):
            return self._socket.recv(LARGEST) or None
        return None

    def hang_up(self) -> None:
        """Close the socket."""
        _hang_up(self._socket)


def _hang_up(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)  # ends the connection even if a forked process has a copy of the socket
    connected.close()


def _is_of_same_user(connected: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def wait(references: Collection[Reference], num_returns: int, timeout_s: float) -> list[Reference]:
    """Wait for remote calls as `ray.wait` does. Return the calls that have ended.

    Unlike `ray.wait`, this function may return more than `num_returns` calls, and returns them in any order.

    Args:
        references: The calls, as `Line`s or Ray object references.
        num_returns: Number of calls to wait for.
        timeout_s: Longest time to wait.
    """
    import ray

    calls = [each for each in references if isinstance(each, Line)]
    if not calls:
        return list(ray.wait(list(references), num_returns=num_returns, timeout=timeout_s)[0])
    until = time.monotonic() + timeout_s
    done: set[Reference] = {each for each in calls if each.has_answer}
    while len(done) < num_returns:
        left_s = max(min(until - time.monotonic(), _FOREVER_S), 0.0)
        by_line = [each for each in calls if each not in done and not each.is_ended]
        if len(by_line) + len(done) == len(references):  # no Ray call is left to wait for
            if wait_for_sockets([each.fileno() for each in by_line], left_s):
                done |= {each for each in by_line if each.has_answer}
                continue
            left_s = 0.0
        elif by_line:
            left_s = min(left_s, _SHORTLY_S)
        ended = _ended_for_ray([each for each in references if each not in done], num_returns - len(done), left_s)
        done |= {*ended, *(each for each in by_line if each.has_answer)}
        if time.monotonic() >= until:
            break
    return list(done)


def _ended_for_ray(references: Sequence[Reference], num_returns: int, timeout_s: float) -> list[Reference]:
    import ray

    asked = {each.attending if isinstance(each, Line) else each: each for each in references}
    return [asked[reference] for reference in ray.wait(list(asked), num_returns=num_returns, timeout=timeout_s)[0]]
