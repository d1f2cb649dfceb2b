"""Gloo's sockets between the ranks of a group, which can be cut to end all waits at once.

When a rank dies, only the ranks that were exchanging data with it notice. The others wait for ranks that have given up,
and gloo has no call that ends such a wait. Shutting down their sockets does. It works from any thread, even if no
packet ever reports that the other side is gone. The addresses of the ranks are read from what gloo writes on the board:
ADR 55.

Works on Linux only, because it reads `/proc`. On other systems it finds and cuts nothing; ranks that wait are then
replaced, not kept.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from raysgd.core.connections.mesh.board import Board

LATER_S = 1.0  # the first steps of a new group take less time

_HEAD = 256  # bytes to read of what gloo writes: the address comes first, and the rest grows with the number of ranks
_FLOW = bytes(4)  # flow information, between port and host of an IPv6 address
_FOLDER = "/proc/self/fd"
_SIZE_OF_ADDRESS = 28  # of an IPv6 address, the larger kind


class DelayedCalls:
    """Calls functions in a separate thread, one a second."""

    def __init__(self, *things: Callable[[], object]) -> None:
        self._things = things
        self._is_hurried = threading.Event()
        self._thread = threading.Thread(target=self._do, name="raysgd-later", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True if all functions have been called."""
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Call the remaining functions now. Return when they have ended."""
        self._is_hurried.set()
        self._thread.join()

    def _do(self) -> None:
        for thing in self._things:
            self._is_hurried.wait(LATER_S)
            thing()


class GlooConnections:
    """Gloo's sockets of all process groups that a rank forms with the same others.

    Args:
        board: Holds the addresses at which ranks listen, written by gloo or with `as_written`.

    Attributes:
        found: The sockets of this rank; None before `look`.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.found: list[OpenSocket] | None = None

    def look(self) -> None:
        """Find the sockets. Call it right after a group has formed.

        Addresses that are written later belong to groups that others form, which may end at any time.
        """
        self.found = self._find()

    def cut(self) -> None:
        """Shut down all sockets, even while a group forms."""
        found = self.found
        for connection in self._find() if found is None else found:
            connection.shut()

    @property
    def are_open(self) -> bool:
        """True if all sockets that were found are still open."""
        return all(connection.is_open for connection in self.found or ())

    def _find(self) -> list[OpenSocket]:
        connections, _ = opened_since({})
        hosts = {address.rpartition(":")[0] for connection in connections for address in connection.ends}
        return between_ranks(connections, addresses_in(self._board.values, hosts))


def as_written(address: str) -> bytes:
    """Return the address of a socket as gloo writes it, in the layout of C: port, then host."""
    host, _, port = address.rpartition(":")
    return int(port).to_bytes(2, "big") + _packed(host)


def addresses_in(values: Iterable[bytes], hosts: Iterable[str]) -> set[str]:
    """Return the addresses with one of these hosts that the values contain, as gloo writes them."""
    packed = {host: _packed(host) for host in hosts}
    heads = [value[:_HEAD] for value in values]
    return {f"{host}:{port}" for head in heads for host in packed for port in _ports(head, packed[host])}


def _packed(host: str) -> bytes:
    family, between = (socket.AF_INET6, _FLOW) if ":" in host else (socket.AF_INET, b"")
    return between + socket.inet_pton(family, host.partition("%")[0])


def _ports(value: bytes, host: bytes) -> Iterator[int]:
    """Yield the port before each occurrence of `host`."""
    at = value.find(host, 2)
    while at >= 0:
        yield int.from_bytes(value[at - 2 : at], "big")
        at = value.find(host, at + 1)


Ends: TypeAlias = tuple[str, str]
"""Local and remote address of a connection, as text."""

_IPV4_IN_IPV6 = bytes(10) + b"\xff\xff"


@dataclass(frozen=True)
class OpenSocket:
    """An open connection. `identity` tells its socket from a later one with the same number."""

    number: int
    identity: int
    ends: Ends

    @property
    def is_open(self) -> bool:
        """True if this process still has it. Gloo closes a connection that the other side has ended."""
        return _identity(self.number) == self.identity

    def shut(self) -> None:
        """Shut down the socket for both sides. Does nothing if it is already closed."""
        with suppress(OSError):  # it may be closed already
            duplicate = os.dup(self.number)  # no other thread can close the duplicate
            try:
                if _identity(duplicate) == self.identity:
                    _shut(duplicate)
            finally:
                os.close(duplicate)


def open_sockets() -> dict[int, int]:
    """Return the sockets of this process, as identities by number."""
    found = {}
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return {}
    for name in names:  # there are many, and `_identity` would take twice as long
        number = int(name)
        try:
            status = os.fstat(number)
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[number] = status.st_ino
    return found


def opened_since(before: dict[int, int]) -> tuple[list[OpenSocket], list[str]]:
    """Return the TCP sockets that were opened after `before` was taken.

    Returns:
        The connected sockets, and the addresses of the listening ones.
    """
    connections, listening = list[OpenSocket](), list[str]()
    for number, identity in open_sockets().items():
        ends = _ends(number) if before.get(number) != identity else ()
        if len(ends) == 2:
            connections.append(OpenSocket(number, identity, ends))
        else:
            listening.extend(ends)
    return connections, listening


def between_ranks(own: Sequence[OpenSocket], listening: Set[str]) -> list[OpenSocket]:
    """Return the sockets of `own` that lead to an address at which a rank listens, this one or another."""
    return [connection for connection in own if listening & set(connection.ends)]


def _identity(number: int) -> int:
    """Return the inode of a socket; 0 for anything else."""
    try:
        status = os.fstat(number)
    except OSError:
        return 0
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0


def _shut(number: int) -> None:
    borrowed = socket.SocketType(fileno=number)
    try:
        borrowed.shutdown(socket.SHUT_RDWR)
    finally:
        borrowed.detach()


def _ends(number: int) -> Ends | tuple[str] | tuple[()]:
    """Return both ends of a TCP connection, or the address of a listening socket; nothing for anything else.

    This calls C, because a socket object of Python would make the socket non-blocking after `socket.setdefaulttimeout`,
    and most of these sockets belong to other code.
    """
    c = _c()
    own = _address(c.getsockname, number)
    if own is None:
        return ()
    remote = _address(c.getpeername, number)
    if remote is not None:
        return own, remote
    listens, size = ctypes.c_int(), ctypes.c_uint32(4)
    c.getsockopt(number, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(listens), ctypes.byref(size))
    return (own,) if listens.value else ()


@cache
def _c() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _address(ask: Callable[..., int], number: int) -> str | None:
    """Return the result of C's `getsockname` or `getpeername`; None if it is not a TCP socket or has no such end."""
    room, size = ctypes.create_string_buffer(_SIZE_OF_ADDRESS), ctypes.c_uint32(_SIZE_OF_ADDRESS)
    if ask(number, room, ctypes.byref(size)) != 0:
        return None
    family, port = int.from_bytes(room.raw[:2], sys.byteorder), int.from_bytes(room.raw[2:4], "big")
    if family == socket.AF_INET:
        packed = room.raw[4:8]
    elif family == socket.AF_INET6:
        packed = room.raw[8:24].removeprefix(_IPV4_IN_IPV6)
    else:
        return None
    return f"{socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)}:{port}"
