"""The TCP connections between the ranks of a group, so that a broken group can be cut at once.

When a rank dies, only the ranks that were talking to it notice. The others wait for ranks which have given up, and gloo
has no call that ends such a wait. Shutting their sockets down does, from any thread, and also where no packet will ever
say that the other side is gone.

Linux only, as it reads `/proc`. Elsewhere nothing is found and nothing cut; such ranks are then replaced, not kept.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

Ends: TypeAlias = tuple[str, str]
"""Local and remote end of a connection, as text."""

_FOLDER = "/proc/self/fd"


@dataclass(frozen=True)
class OpenSocket:
    """One open connection, by its socket; `identity` tells it from a later one under the same number."""

    number: int
    identity: int
    ends: Ends

    @property
    def is_open(self) -> bool:
        """Whether this process has it still; gloo closes one that the other side has ended."""
        return _identity(self.number) == self.identity

    def shut(self) -> None:
        """Ends it for both sides; nothing happens if it is closed already."""
        with suppress(OSError):  # closed or ended already
            duplicate = os.dup(self.number)  # no other thread closes it
            try:
                if _identity(duplicate) == self.identity:
                    _shut(duplicate)
            finally:
                os.close(duplicate)


@dataclass(frozen=True)
class Opened:
    """TCP sockets that were opened meanwhile.

    Attributes:
        connections: Those with two ends.
        listening: Where others listen.
    """

    connections: list[OpenSocket]
    listening: list[str]


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


def opened_since(before: dict[int, int]) -> Opened:
    """The TCP sockets that exist now and did not when `before` was taken."""
    opened = Opened([], [])
    for number, identity in open_sockets().items():
        ends = _ends(number) if before.get(number) != identity else ()
        if len(ends) == 2:
            opened.connections.append(OpenSocket(number, identity, ends))
        else:
            opened.listening.extend(ends)
    return opened


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
    """Both ends of a TCP connection; of a socket that listens, its address; of anything else, nothing."""
    try:
        borrowed = socket.SocketType(fileno=number)  # `socket.socket` takes three times as long
    except OSError:  # it was closed in this very moment
        return ()
    try:
        return _ends_of(borrowed)
    except OSError:  # it is not connected, or was closed in this very moment
        return ()
    finally:
        borrowed.detach()


def _ends_of(borrowed: socket.SocketType) -> Ends | tuple[str] | tuple[()]:
    if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
        return ()
    own = _text(borrowed.getsockname())
    if borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return (own,)
    return own, _text(borrowed.getpeername())


def _text(address: tuple[object, ...]) -> str:
    host = str(address[0]).removeprefix("::ffff:")
    return f"{host}:{address[1]}"
