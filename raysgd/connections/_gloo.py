"""Gloo's connections between the ranks of a group, so that they can be cut at once.

When a rank dies, only the ranks that were talking to it notice. The others wait for ranks which have given up, and gloo
has no call that ends such a wait. Shutting their sockets down does, from any thread, and also where no packet will ever
say that the other side is gone. Where ranks listen is read from what gloo writes on the board: ADR 55.

Linux only, as it reads `/proc`. Elsewhere nothing is found and nothing cut; such ranks are then replaced, not kept.
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

from raysgd.connections.mesh.board import Board

LATER_S = 1.0  # by then the first steps of a group are over

_HEAD = 256  # of what gloo writes: the address stands in the first bytes, and the rest grows with the number of ranks
_FLOW = bytes(4)  # stands between port and host in an address of IPv6
_FOLDER = "/proc/self/fd"
_SIZE_OF_ADDRESS = 28  # that of IPv6


class DelayedCalls:
    """Calls functions in a separate thread, each of them a second after the one before."""

    def __init__(self, *things: Callable[[], object]) -> None:
        self._things = things
        self._is_hurried = threading.Event()
        self._thread = threading.Thread(target=self._do, name="raysgd-later", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True if all is done."""
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Do now what is not done yet. Return when that is over."""
        self._is_hurried.set()
        self._thread.join()

    def _do(self) -> None:
        for thing in self._things:
            self._is_hurried.wait(LATER_S)
            thing()


class GlooConnections:
    """Those of all groups that a rank forms with the same others.

    Args:
        board: Holds the addresses at which ranks listen, written by gloo or with `as_written`.

    Attributes:
        found: Those of this rank; None until they have been looked for.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.found: list[OpenSocket] | None = None

    def look(self) -> None:
        """Look for them. Call it when a group has just formed.

        What is written from now on is of groups that others form, which may end at any time.
        """
        self.found = self._find()

    def cut(self) -> None:
        """End all of them, also while a group forms."""
        found = self.found
        for connection in self._find() if found is None else found:
            connection.shut()

    @property
    def are_open(self) -> bool:
        """True if all that were found are still there."""
        return all(connection.is_open for connection in self.found or ())

    def _find(self) -> list[OpenSocket]:
        connections, _ = opened_since({})
        hosts = {address.rpartition(":")[0] for connection in connections for address in connection.ends}
        return between_ranks(connections, addresses_in(self._board.values, hosts))


def as_written(address: str) -> bytes:
    """The address of a socket as gloo writes it, which is how C has it: the port, then the host."""
    host, _, port = address.rpartition(":")
    return int(port).to_bytes(2, "big") + _packed(host)


def addresses_in(values: Iterable[bytes], hosts: Iterable[str]) -> set[str]:
    """The addresses with one of these hosts that the values contain, as gloo writes them."""
    packed = {host: _packed(host) for host in hosts}
    heads = [value[:_HEAD] for value in values]
    return {f"{host}:{port}" for head in heads for host in packed for port in _ports(head, packed[host])}


def _packed(host: str) -> bytes:
    family, between = (socket.AF_INET6, _FLOW) if ":" in host else (socket.AF_INET, b"")
    return between + socket.inet_pton(family, host.partition("%")[0])


def _ports(value: bytes, host: bytes) -> Iterator[int]:
    """Yield what stands before each `host`."""
    at = value.find(host, 2)
    while at >= 0:
        yield int.from_bytes(value[at - 2 : at], "big")
        at = value.find(host, at + 1)


Ends: TypeAlias = tuple[str, str]
"""Local and remote end of a connection, as text."""

_IPV4_IN_IPV6 = bytes(10) + b"\xff\xff"


@dataclass(frozen=True)
class OpenSocket:
    """One open connection, by its socket; `identity` tells it from a later one under the same number."""

    number: int
    identity: int
    ends: Ends

    @property
    def is_open(self) -> bool:
        """True if this process has it still; gloo closes one that the other side has ended."""
        return _identity(self.number) == self.identity

    def shut(self) -> None:
        """End it for both sides; nothing happens if it is closed already."""
        with suppress(OSError):  # closed or ended already
            duplicate = os.dup(self.number)  # no other thread closes it
            try:
                if _identity(duplicate) == self.identity:
                    _shut(duplicate)
            finally:
                os.close(duplicate)


def open_sockets() -> dict[int, int]:
    """The sockets of this process by number, with their identity."""
    found = {}
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return {}
    for name in names:  # of which there are many: `_identity` would take twice as long
        number = int(name)
        try:
            status = os.fstat(number)
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[number] = status.st_ino
    return found


def opened_since(before: dict[int, int]) -> tuple[list[OpenSocket], list[str]]:
    """The TCP sockets that exist now and did not when `before` was taken.

    Returns:
        Those with two ends; and where others listen.
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
    """Those of `own` that lead to where some rank listens, this one or another."""
    return [connection for connection in own if listening & set(connection.ends)]


def _identity(number: int) -> int:
    """The inode of a socket; 0 for anything else."""
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
    """Both ends of a TCP connection; of a socket that listens, its address; of anything else, nothing.

    C is asked, because an object of Python's would make the socket non-blocking where `socket.setdefaulttimeout` was
    called, and most of these sockets belong to others.
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
    """Return what C's `getsockname` or `getpeername` says; None for what is no TCP socket, or has no such end."""
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
