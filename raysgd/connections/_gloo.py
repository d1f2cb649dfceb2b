"""Gloo's connections between the ranks of a group, so that they can be ended.

Where ranks listen is read from what gloo writes on the board: ADR 112.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator

from raysgd.connections.mesh.board import Board
from raysgd.connections.mesh.process_sockets import OpenSocket, between_ranks, opened_since

LATER_S = 1.0  # by then the first steps of a group are over

_HEAD = 256  # of what gloo writes: the address stands in the first bytes, and the rest grows with the number of ranks
_FLOW = bytes(4)  # stands between port and host in an address of IPv6


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
        """Does now what is not done yet. Returns when that is over."""
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
        """Looks for them. Call it when a group has just formed.

        What is written from now on is of groups that others form, which may end at any time.
        """
        self.found = self._find()

    def end(self) -> None:
        """Ends all of them, also while a group forms."""
        found = self.found
        for connection in self._find() if found is None else found:
            connection.shut()

    @property
    def are_open(self) -> bool:
        """True if all that were found are still there."""
        return all(connection.is_open for connection in self.found or ())

    def _find(self) -> list[OpenSocket]:
        connections = opened_since({}).connections
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
