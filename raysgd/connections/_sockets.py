"""The TCP connections between the ranks of a group, so that a broken group can be cut at once.

When a rank dies, only the ranks that were talking to it notice. The others wait for ranks which have given up, and gloo
has no call that ends such a wait. Shutting their sockets down does, from any thread, and also where no packet will ever
say that the other side is gone.

Linux only, as it reads `/proc`. Elsewhere nothing is found and nothing cut; such ranks are then replaced, not kept.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

Ends: TypeAlias = tuple[str, str]
"""Local and remote end of a connection, as text."""

_FOLDER = "/proc/self/fd"


@dataclass(frozen=True)
class OpenSocket:
    """One open connection, by its socket; `identity` tells it from a later one under the same number."""

    number: int
    identity: str
    ends: Ends

    @property
    def is_open(self) -> bool:
        """Whether this process has it still; gloo closes one that the other side has ended."""
        return _identity(self.number) == self.identity

    def shut(self) -> None:
        """Ends it for both sides; nothing happens if it is closed already."""
        if not self.is_open:
            return
        try:
            with socket.socket(fileno=os.dup(self.number)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed in this very moment


def open_sockets() -> dict[int, str]:
    """The sockets of this process by number, with their identity."""
    try:
        numbers = [int(name) for name in os.listdir(_FOLDER)]
    except OSError:
        return {}
    found = {number: _identity(number) for number in numbers}
    return {number: identity for number, identity in found.items() if identity.startswith("socket:")}


def opened_since(before: dict[int, str]) -> list[OpenSocket]:
    """The TCP connections that exist now and did not when `before` was taken."""
    found = []
    for number, identity in open_sockets().items():
        ends = _ends(number) if before.get(number) != identity else None
        if ends is not None:
            found.append(OpenSocket(number, identity, ends))
    return found


def listening_since(before: dict[int, str]) -> list[str]:
    """Where TCP sockets listen that exist now and did not when `before` was taken."""
    found = (_listens_at(number) for number, identity in open_sockets().items() if before.get(number) != identity)
    return [address for address in found if address is not None]


def between_ranks(own: Sequence[OpenSocket], listening: Set[str]) -> list[OpenSocket]:
    """Those of `own` that lead to where some rank listens, this one or another."""
    return [connection for connection in own if listening & set(connection.ends)]


def _identity(number: int) -> str:
    try:
        return os.readlink(f"{_FOLDER}/{number}")
    except OSError:
        return ""


def _ends(number: int) -> Ends | None:
    try:
        with socket.socket(fileno=os.dup(number)) as duplicate:
            if not _is_tcp(duplicate):
                return None
            return _text(duplicate.getsockname()), _text(duplicate.getpeername())
    except OSError:  # a socket that listens has no other end
        return None


def _listens_at(number: int) -> str | None:
    try:
        with socket.socket(fileno=os.dup(number)) as duplicate:
            is_listening = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return _text(duplicate.getsockname()) if is_listening and _is_tcp(duplicate) else None
    except OSError:  # closed in this very moment
        return None


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def _text(address: tuple[object, ...]) -> str:
    host = str(address[0]).removeprefix("::ffff:")
    return f"{host}:{address[1]}"
