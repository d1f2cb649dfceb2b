"""Which ranks send to which: the ranks of each node, trees of ranks, and chains of ranks that pass bytes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from raysgd.core.connections.mesh.mesh import Bytes


@dataclass(frozen=True)
class Nodes:
    """The ranks of a worker group, by node.

    Attributes:
        hosts: The address of each rank's node, by rank. Must be identical on all ranks.
    """

    hosts: tuple[str, ...]

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The ranks of each node. Nodes are ordered by their first rank."""
        ranks_of: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks_of.setdefault(host, []).append(rank)
        return list(ranks_of.values())

    @cached_property
    def are_shared(self) -> bool:
        """True if there are several nodes and any node has several ranks."""
        return 1 < len(self.ranks) < len(self.hosts)

    @cached_property
    def leaders(self) -> list[int]:
        """The first rank of each node, in the order of `ranks`."""
        return [ranks[0] for ranks in self.ranks]

    @cached_property
    def columns(self) -> list[list[int]]:
        """Lists of ranks (columns) that each contain one rank of every node. Each column sums one part of an array.

        The node with the fewest ranks determines the number of columns.
        """
        return [list(column) for column in zip(*self.ranks, strict=False)]

    @cached_property
    def in_order(self) -> list[int]:
        """All ranks, ordered by node."""
        return [rank for ranks in self.ranks for rank in ranks]

    def beside(self, rank: int) -> list[int]:
        """Return all ranks on the node of `rank`, including `rank`."""
        return next(ranks for ranks in self.ranks if rank in ranks)


def doubled(size: int) -> list[int]:
    """Return the powers of two below `size`."""
    return [1 << exponent for exponent in range((size - 1).bit_length())]


def tree(ranks: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """Return a rank's parent and children in the broadcast tree that starts at the first of `ranks`.

    The children are in the order in which the rank sends to them. In each round of messages, the number of ranks that
    have the data doubles.
    """
    place, above, passed_on = list(ranks).index(rank), None, list[int]()
    for step in reversed(doubled(len(ranks))):
        if place % (2 * step) == 0 and place + step < len(ranks):
            passed_on.append(ranks[place + step])
        elif place % (2 * step) == step:
            above = ranks[place - step]
    return above, passed_on


PIECE_BYTES = 2**20


ChainTransfer: TypeAlias = Callable[[Mapping[int, Bytes], Mapping[int, Bytes]], None]
"""Sends messages to some ranks and receives messages from some ranks, all at the same time, like `Mesh.swap`."""


class Chain:
    """One rank's position in a chain of ranks, through which bytes are forwarded from a source to all other ranks.

    The bytes are sent in pieces, and each rank receives one piece while it sends the previous piece. The whole chain
    therefore takes little longer than one transfer, whatever its length, and the source sends the bytes only once. ADR
    35 explains why the source does not send to each rank directly.

    Args:
        move: Transfers pieces between this rank and its neighbors in the chain.
        rank: This rank.
        source: The rank that has the bytes.
        takers: The ranks that receive the bytes, in chain order. Must be the same on all ranks.
        piece_bytes: Size of a piece. Must be the same on all ranks.
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
        """Transfer the contents of buffers through the chain.

        Args:
            *parts: The buffers. The source sends from them. Each other rank receives into them and forwards each piece.
        """
        size = self._piece_bytes
        pieces = [part[start : start + size] for part in parts for start in range(0, len(part), size)]
        incoming = [] if self._before is None else pieces
        outgoing = [] if self._after is None else pieces if self._before is None else [None, *pieces]
        for sent, received in itertools.zip_longest(outgoing, incoming):
            self._move(_with(self._after, sent), _with(self._before, received))


def _with(rank: int | None, piece: Bytes | None) -> dict[int, Bytes]:
    return {} if rank is None or piece is None else {rank: piece}
