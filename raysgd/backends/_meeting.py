"""A meeting of all ranks at which each says one thing and hears what all said. Needs nothing but sockets."""

from __future__ import annotations

import json
import struct
from contextlib import ExitStack

from raysgd.backends._guests import MeetingFailed, Patience, Reception, call_on, expect, receive, send
from raysgd.engine.types import Rendezvous

_LENGTH = struct.Struct("<I")


class Meeting:
    """One meeting: rank 0 opens it, and every rank calls `exchange` once."""

    def __init__(self) -> None:
        self._reception: Reception | None = None

    def open(self) -> int:
        """On rank 0: begins to listen, and returns the port."""
        self._reception = Reception()
        return self._reception.port

    def close(self) -> None:
        """Stops listening."""
        if self._reception is not None:
            self._reception.close()
            self._reception = None

    def exchange(self, rendezvous: Rendezvous, rank: int, size: int, word: str, patience: Patience) -> list[str]:
        """Says `word`; returns what each rank said, by rank.

        Args:
            rendezvous: Where rank 0 is, at the port that `open` returned there.
            rank: Who speaks.
            size: How many there are.
            word: What to say.
            patience: How long to wait for the others.

        Raises:
            MeetingFailed: Another rank did not come, or is gone.
        """
        try:
            if self._reception is not None:
                return self._preside(self._reception, rendezvous.secret, size, word, patience)
            return self._attend(rendezvous, rank, word, patience)
        except OSError as error:
            if isinstance(error, MeetingFailed):
                raise
            place = f"{rendezvous.address}:{rendezvous.port}"
            raise MeetingFailed(f"rank {rank} could not meet the others at {place}: {error}") from error

    def _preside(self, reception: Reception, secret: bytes, size: int, word: str, patience: Patience) -> list[str]:
        words = {0: word}
        with ExitStack() as stack:
            connections = []
            for guest in expect(reception, secret, size - 1, patience):
                connections.append(stack.enter_context(guest.connection))
                words[guest.rank] = receive(guest.connection, guest.number, patience).decode()
            said = [words[rank] for rank in range(size)]
            answer = json.dumps(said).encode()
            for connection in connections:
                send(connection, _LENGTH.pack(len(answer)) + answer, patience)
        self.close()
        return said

    def _attend(self, rendezvous: Rendezvous, rank: int, word: str, patience: Patience) -> list[str]:
        said = word.encode()
        host, port, secret = rendezvous.address, rendezvous.port, rendezvous.secret
        with call_on(host, port, secret, rank, len(said), patience) as connection:
            send(connection, said, patience)
            (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size, patience))
            return [str(each) for each in json.loads(receive(connection, length, patience))]
