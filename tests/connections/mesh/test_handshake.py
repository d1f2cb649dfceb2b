"""How two ranks prove to each other that they belong to one group; over sockets, see test_peers.py."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

import pytest

from raysgd.connections.mesh.handshake import ConnectFailed, Credentials, Handshake, Peer

SECRET = secrets.token_bytes(32)


def test_a_proof_cannot_be_used_between_other_ranks_or_in_the_other_role() -> None:
    credentials, nonces = Credentials(1, SECRET), secrets.token_bytes(32)
    proofs = {
        credentials.proof(role, initiator, responder, lane, nonces)
        for role in (b"responder", b"initiator")
        for initiator, responder in ((1, 0), (0, 1), (1, 2))
        for lane in (0, 1)
    }
    assert len(proofs) == 12
    assert credentials.proof(b"responder", 1, 0, 0, nonces) not in {
        Credentials(1, SECRET).proof(b"responder", 1, 0, 0, bytes(32))
    }


def both(initiates: Handshake, responds: Handshake) -> list[Peer]:
    """Lets both sides take turns until both are done."""
    done: list[Peer] = []
    sides = [initiates, responds]
    while sides:
        for side in list(sides):
            try:
                next(side)
            except StopIteration as end:
                sides.remove(side)
                done.append(end.value)
    return done


@pytest.mark.parametrize("knows", [True, False])
def test_both_know_each_other_afterwards_or_neither(knows: bool) -> None:
    with ExitStack() as stack:
        near, far = (stack.enter_context(end) for end in socket.socketpair())
        near.setblocking(False)
        far.setblocking(False)
        other = Credentials(4, SECRET if knows else bytes(32))
        sides = Credentials(2, SECRET).initiate(near, 4, lane=1), other.respond(far)
        if not knows:
            with pytest.raises(ConnectFailed, match="in place of rank 4 does not belong to the group"):
                both(*sides)
            return
        assert both(*sides) == [Peer(near, 4, 1), Peer(far, 2, 1)]
