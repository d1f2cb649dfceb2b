"""Bytes on their way from one rank through several others: in pieces, each rank passing on to the next.

A rank receives one piece while it sends the one before it. So all have everything in about the time that one transfer
takes, however many they are, and the giver sends it once.

Why not from the giver to each: ADR 90.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from raysgd.connections.mesh.mesh import Bytes

PIECE_BYTES = 2**20


ChainTransfer: TypeAlias = Callable[[Mapping[int, Bytes], Mapping[int, Bytes]], None]
"""Sends bytes to some ranks and receives from some, all at the same time, as `Mesh.swap` does."""


class Chain:
    """One rank's place on the way.

    Args:
        move: Moves pieces between this rank and its neighbors.
        rank: This rank.
        source: Who has the bytes.
        takers: Who takes them, in the order of the way. All on the way name the same ones.
        piece_bytes: The size of a piece; alike on all.
    """

    def __init__(
        self, move: ChainTransfer, rank: int, source: int, takers: Sequence[int], piece_bytes: int = PIECE_BYTES
    ) -> None:
        way = (source, *takers)
        place = way.index(rank)
        self._move, self._piece_bytes = move, piece_bytes
        self._before = way[place - 1] if place else None
        self._after = way[place + 1] if place + 1 < len(way) else None

    def pass_on(self, *parts: Bytes) -> None:
        """At the source sends the parts. Elsewhere fills them, and sends each piece on while the next one comes."""
        held: Bytes | None = None
        for piece in self._pieces(parts):
            if self._before is None:
                self._send(piece)
            else:
                self._move(self._to_next(held), {self._before: piece})
            held = piece
        if self._before is not None:
            self._send(held)

    def _send(self, piece: Bytes | None) -> None:
        outgoing = self._to_next(piece)
        if outgoing:
            self._move(outgoing, {})

    def _to_next(self, piece: Bytes | None) -> dict[int, Bytes]:
        return {} if self._after is None or piece is None else {self._after: piece}

    def _pieces(self, parts: Sequence[Bytes]) -> Iterator[Bytes]:
        for part in parts:
            for start in range(0, len(part), self._piece_bytes):
                yield part[start : start + self._piece_bytes]
