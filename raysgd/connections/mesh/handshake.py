"""Proofs of two ranks to each other that they belong to one group.

Any process that reaches the port may connect. Both sides know a secret that the driver made for this group and sent
through Ray. Each proves that it knows the secret with an HMAC over a nonce that the other side has just drawn; it never
sends the secret. See docs/adr/0055-ranks-find-each-other-through-ray.md.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import select
import socket
import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

_HELLO = struct.Struct("<II16s")  # the rank that connects, the lane, and a nonce
_NONCE_LENGTH = 16
_PROOF_LENGTH = 32
_NOT_YET = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOTCONN)  # the last one is what a Mac says while it connects


class ConnectFailed(ConnectionError):
    """Another rank failed, was too late, or cannot be reached, before the group was formed."""


class Peer(NamedTuple):
    """A connected rank that has proved that it belongs to the group.

    Attributes:
        connection: To it; does not block.
        rank: Its rank.
        lane: Which of several connections to it this is.
    """

    connection: socket.socket
    rank: int
    lane: int


Handshake: TypeAlias = Generator[int, None, Peer]
"""One in progress; where it waits for the other side, it yields the events of `select.poll` that it waits for."""


@dataclass(frozen=True)
class Credentials:
    """The secret and the name that a rank proves itself with."""

    rank: int
    secret: bytes

    def proof(self, role: bytes, initiator: int, responder: int, lane: int, nonces: bytes) -> bytes:
        """Return what only a rank with the secret can answer to these nonces, in this role and between these ranks."""
        return hmac.digest(self.secret, role + struct.pack("<III", initiator, responder, lane) + nonces, "sha256")

    def initiate(self, connection: socket.socket, responder: int, lane: int) -> Handshake:
        """The side that connects to rank `responder`, and may not be connected yet."""
        own = secrets.token_bytes(_NONCE_LENGTH)
        yield from _sent(connection, _HELLO.pack(self.rank, lane, own))
        answer = yield from _received(connection, _NONCE_LENGTH + _PROOF_LENGTH)
        nonces, proof = own + answer[:_NONCE_LENGTH], answer[_NONCE_LENGTH:]
        if not hmac.compare_digest(proof, self.proof(b"responder", self.rank, responder, lane, nonces)):
            raise ConnectFailed(f"the process that listens in place of rank {responder} does not belong to the group")
        yield from _sent(connection, self.proof(b"initiator", self.rank, responder, lane, nonces))
        return Peer(connection, responder, lane)

    def respond(self, connection: socket.socket) -> Handshake:
        """The side that has accepted a connection."""
        initiator, lane, other = _HELLO.unpack((yield from _received(connection, _HELLO.size)))
        own = secrets.token_bytes(_NONCE_LENGTH)
        nonces = other + own
        yield from _sent(connection, own + self.proof(b"responder", initiator, self.rank, lane, nonces))
        proof = yield from _received(connection, _PROOF_LENGTH)
        if not hmac.compare_digest(proof, self.proof(b"initiator", initiator, self.rank, lane, nonces)):
            raise ConnectFailed("a process that connected does not belong to the group")
        return Peer(connection, initiator, lane)


def _sent(connection: socket.socket, message: bytes) -> Generator[int, None, None]:
    while message:
        try:
            message = message[connection.send(message) :]
        except OSError as error:
            if error.errno not in _NOT_YET:
                raise
            yield select.POLLOUT


def _received(connection: socket.socket, length: int) -> Generator[int, None, bytes]:
    received = b""
    while len(received) < length:
        yield select.POLLIN
        try:
            part = connection.recv(length - len(received))
        except BlockingIOError:
            continue
        if not part:
            raise ConnectFailed("another rank left before the group was formed")
        received += part
    return received
