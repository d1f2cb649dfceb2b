"""Finds the sockets that gloo uses between the ranks of a group, and shuts them down to abort gloo's collectives.

When a rank dies, only the ranks that were communicating with it notice. The other ranks keep waiting for ranks that
have given up, and gloo has no call to abort such a wait. Shutting down the sockets does abort it. This works from any
thread, even if no packet ever reports that the peer is gone. To recognize the sockets, this module reads the ranks'
addresses from the values that gloo writes to the board, the key-value store of the group (ADR 55).

This module works on Linux only, because it reads `/proc`. On other systems it finds no sockets, and waiting ranks are
replaced instead of kept.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from raysgd.core.connections.mesh.board import Board

LATER_S = 1.0  # seconds before old connections are shut down; long enough for the first steps of the next group

_HEAD = 256  # number of bytes to search in a value from gloo: the address comes first, and values may be long
_FLOW = bytes(4)  # IPv6 flow information, between port and host in C's `sockaddr_in6`
_FOLDER = "/proc/self/fd"
_SIZE_OF_ADDRESS = 28  # size of `sockaddr_in6`, which is larger than `sockaddr_in`


class DelayedCalls:
    """Calls functions one after the other in a background thread.

    Before each call, the thread waits `LATER_S` seconds.
    """

    def __init__(self, *things: Callable[[], object]) -> None:
        self._things = things
        self._is_hurried = threading.Event()
        self._thread = threading.Thread(target=self._do, name="raysgd-later", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True if all functions have been called and have returned."""
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Call the remaining functions without further delay, and wait until they have returned."""
        self._is_hurried.set()
        self._thread.join()

    def _do(self) -> None:
        for thing in self._things:
            self._is_hurried.wait(LATER_S)
            thing()


class GlooConnections:
    """One rank's gloo sockets, in all process groups over the same ranks.

    Args:
        board: The group's key-value store. It contains the addresses at which ranks listen, encoded by gloo or by
            `as_written`.

    Attributes:
        found: The sockets of this rank, or None until `look` is called.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.found: list[OpenSocket] | None = None

    def look(self) -> None:
        """Find this rank's gloo sockets and store them in `found`. Call this right after a group has formed.

        Sockets that are opened later are ignored. They belong to groups that other code forms, and may close at any
        time.
        """
        self.found = self._find()

    def cut(self) -> None:
        """Shut down the sockets in `found`. If it is None, shut down all of this rank's gloo sockets.

        These then include the sockets of a group that is still forming.
        """
        known = self.found
        for connection in self._find() if known is None else known:
            connection.shut()

    @property
    def are_open(self) -> bool:
        """True if all sockets in `found` are still open."""
        return all(connection.is_open for connection in self.found or ())

    def _find(self) -> list[OpenSocket]:
        connections, _ = opened_since({})
        hosts = {address.rpartition(":")[0] for connection in connections for address in connection.ends}
        listening = addresses_in(self._board.values, hosts)
        return [connection for connection in connections if listening & set(connection.ends)]


def as_written(address: str) -> bytes:
    """Encode the port and the host of a socket address as gloo does.

    These are the bytes that follow the address family in C's `sockaddr`.
    """
    host, _, port = address.rpartition(":")
    return int(port).to_bytes(2, "big") + _packed(host)


def addresses_in(values: Iterable[bytes], hosts: Iterable[str]) -> set[str]:
    """Return the socket addresses in the values that gloo wrote to the board.

    Args:
        values: The values on the board.
        hosts: Host addresses to search for. Other addresses in the values are not found.
    """
    heads, ports = [value[:_HEAD] for value in values], dict[str, list[bytes]]()
    for host in hosts:
        before_host = re.compile(b"(?s)(?=(..)%b)" % re.escape(_packed(host)))
        ports[host] = [port for head in heads for port in before_host.findall(head)]
    return {f"{host}:{int.from_bytes(port, 'big')}" for host, found in ports.items() for port in found}


def _packed(host: str) -> bytes:
    family, between = (socket.AF_INET6, _FLOW) if ":" in host else (socket.AF_INET, b"")
    return between + socket.inet_pton(family, host.partition("%")[0])


Ends: TypeAlias = tuple[str, str]
"""Local and remote address of a connection, as strings."""

_IPV4_IN_IPV6 = bytes(10) + b"\xff\xff"


@dataclass(frozen=True)
class OpenSocket:
    """An open TCP connection of this process.

    Attributes:
        number: The socket's file descriptor.
        identity: The socket's inode, which distinguishes it from a later socket with the same file descriptor.
        ends: Local and remote address.
    """

    number: int
    identity: int
    ends: Ends

    @property
    def is_open(self) -> bool:
        """True if this process still has the socket. Gloo closes a socket when the other rank ends the connection."""
        return _identity(self.number) == self.identity

    def shut(self) -> None:
        """Shut down the socket in both directions. Do nothing if it is already closed."""
        with suppress(OSError):  # the socket may be closed already
            # Shut down a duplicate, because another thread may close the original meanwhile.
            duplicate = os.dup(self.number)
            try:
                if _identity(duplicate) == self.identity:
                    _shut(duplicate)
            finally:
                os.close(duplicate)


def open_sockets() -> dict[int, int]:
    """Return the inode of each socket that this process has open, by file descriptor."""
    inodes = {}
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return {}
    for name in names:  # inlined for speed: there are many descriptors, and `_identity` would take twice as long
        number = int(name)
        try:
            status = os.fstat(number)
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            inodes[number] = status.st_ino
    return inodes


def opened_since(before: dict[int, int]) -> tuple[list[OpenSocket], list[str]]:
    """Return the TCP sockets that were opened since `open_sockets` returned `before`.

    Returns:
        The connected sockets, and the addresses of the listening sockets.
    """
    connections, listening = list[OpenSocket](), list[str]()
    for number, identity in open_sockets().items():
        ends = _ends(number) if before.get(number) != identity else ()
        if len(ends) == 2:
            connections.append(OpenSocket(number, identity, ends))
        else:
            listening.extend(ends)
    return connections, listening


def _identity(number: int) -> int:
    """Return the inode of an open socket, or 0 if the file descriptor is closed or not a socket."""
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
    """Return the addresses of a TCP socket, as a tuple.

    The tuple contains the local and remote address of a connection, or the address of a listening socket. A connected
    UDP socket counts as a connection. For any other socket, the tuple is empty.

    The addresses come from C functions, because most of these sockets belong to other code: if
    `socket.setdefaulttimeout` was called, wrapping such a socket in a Python object would make it non-blocking.
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
    """Return a socket's address from C's `getsockname` or `getpeername`.

    Return None for a socket that is neither IPv4 nor IPv6, or that has no such address.
    """
    address, size = ctypes.create_string_buffer(_SIZE_OF_ADDRESS), ctypes.c_uint32(_SIZE_OF_ADDRESS)
    if ask(number, address, ctypes.byref(size)) != 0:
        return None
    family, port = int.from_bytes(address.raw[:2], sys.byteorder), int.from_bytes(address.raw[2:4], "big")
    if family == socket.AF_INET:
        packed = address.raw[4:8]
    elif family == socket.AF_INET6:
        packed = address.raw[8:24].removeprefix(_IPV4_IN_IPV6)
    else:
        return None
    return f"{socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)}:{port}"
