"""All-reduce sums of arrays over the ranks of a mesh, and chained transfers from one rank to several others.

Results are bitwise identical on all ranks, because each part of a sum is either computed by one rank and sent to the
others, or computed by all ranks in the same order.

The algorithm depends on the number of ranks, their nodes, and the array's size. These are the same on all ranks, so all
ranks choose the same algorithm:

=================  ====================================  ==================================================
ranks              up to `MAX_WHOLE_BYTES`               larger
=================  ====================================  ==================================================
up to `MOST`       each rank sends its array to all      reduce-scatter, then all-gather
more               reduce up a tree, then broadcast      below `LEAST_PART_BYTES` per rank: reduce up a
                                                         tree, then broadcast; otherwise: reduce-scatter,
                                                         then all-gather
on several nodes   reduce on each node, all-reduce       reduce-scatter on each node, all-reduce each part
                   among the nodes' first ranks, then    between nodes, then all-gather on each node
                   broadcast on each node
=================  ====================================  ==================================================

The last row applies if there are several nodes and any node has several ranks. Each of its sums over a few of the ranks
uses the algorithm that the first two rows list for this number of ranks. As an exception, up to `MOST` ranks on several
nodes also send small arrays directly to all. ADR 35 explains the choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from raysgd.core.connections.mesh.mesh import Bytes, Mesh, Message

MOST = 8
"""Maximum number of ranks for which no sum uses a tree. Among more ranks, small arrays are summed up a tree."""

MAX_WHOLE_BYTES = 64 * 1024
"""Maximum size in bytes of an array that each rank sends whole to the other ranks, instead of in parts."""

LEAST_PART_BYTES = 8 * 1024
"""Part size in bytes above which a sum's time depends more on the amount of data than on the number of messages."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_NO_ROWS: Mapping[int, Array] = {}


class RankSums:
    """Sums arrays over all ranks (all-reduce). Every rank has such an object and calls the same methods.

    Args:
        rank: This rank.
        mesh: Connections to the other ranks.
        nodes: The ranks, grouped by node.
    """

    def __init__(self, rank: int, mesh: Mesh, nodes: Nodes) -> None:
        self._rank, self._mesh, self._nodes = rank, mesh, nodes
        self._all, self._beside = range(len(nodes.hosts)), nodes.beside(rank)
        self._scratch = np.empty(0, np.uint8)

    def add_up(self, flat: Array, kind: int) -> None:
        """Sum an array over all ranks, in place.

        Args:
            flat: One-dimensional array.
            kind: Identifies the type of collective, see `Mesh.swap`.
        """
        is_small = flat.nbytes <= MAX_WHOLE_BYTES
        if not self._nodes.are_shared or (is_small and len(self._all) <= MOST):
            self._among(self._all, flat, kind, is_small)
        elif is_small:
            self._by_leaders(flat, kind)
        else:
            self._by_columns(flat, kind)

    def can_carry(self, flat: Array) -> bool:
        """Return True if `add_up_with` can sum an array of this size. All ranks get the same result."""
        return len(self._all) <= MOST and (flat.nbytes <= MAX_WHOLE_BYTES or not self._nodes.are_shared)

    def add_up_with(self, flat: Array, row: Array, kind: int) -> list[Array]:
        """Sum `flat` over all ranks, in place, and return every rank's `row`, in rank order.

        Rows must have the same length. Call this method only if `can_carry` returns True for `flat`.
        """
        rows = {rank: row if rank == self._rank else np.empty_like(row) for rank in self._all}
        way = self._whole if flat.nbytes <= MAX_WHOLE_BYTES else self._in_parts
        way(self._all, flat, kind, rows)
        return list(rows.values())

    def tell(self, flat: Array, kind: int) -> None:
        """Broadcast an array from rank 0, in place.

        Each rank sends few messages, and the array is sent to each node only once.
        """
        if self._rank in self._nodes.leaders:
            self._spread(self._nodes.leaders, flat, kind)
        self._spread(self._beside, flat, kind)

    # ------------------------------------------------------------------------------------ several nodes

    def _by_leaders(self, flat: Array, kind: int) -> None:
        """Sum an array within each node, then across the first ranks of the nodes.

        The first rank of each node then broadcasts the sum within its node.
        """
        beside = self._beside
        self._among(beside, flat, kind, is_small=True)
        if self._rank == beside[0]:
            self._among(self._nodes.leaders, flat, kind, is_small=True)
        self._spread(beside, flat, kind)

    def _by_columns(self, flat: Array, kind: int) -> None:
        """Reduce-scatter an array on each node, all-reduce each part between nodes, then all-gather on each node.

        Each node sends about twice the array's bytes to other nodes, no matter how many ranks it has. This is no more
        than in a ring over all ranks.
        """
        beside, columns = self._beside, self._nodes.columns
        parts, owners = _divided(flat, len(columns)), beside[: len(columns)]
        self._collect(beside, owners, parts, kind)
        if self._rank in owners:
            own = owners.index(self._rank)
            self._among(columns[own], parts[own], kind, is_small=False)
        self._distribute(beside, owners, parts, kind)

    # ------------------------------------------------------------------------------------ some ranks

    def _among(self, ranks: Sequence[int], flat: Array, kind: int, is_small: bool) -> None:
        """Sum an array over some ranks, in place. All of these ranks must call this method at the same time.

        Args:
            ranks: The ranks that take part in the sum.
            flat: One-dimensional array.
            kind: Identifies the type of collective, see `Mesh.swap`.
            is_small: True to send the whole array, False to send it in parts if that is faster. Sending the whole array
                takes fewer messages, but some ranks send more bytes.
        """
        if len(ranks) == 1:
            return
        if len(ranks) <= MOST:
            way = self._whole if is_small else self._in_parts
            way(ranks, flat, kind)
        elif is_small or flat.nbytes < LEAST_PART_BYTES * len(ranks):
            self._by_tree(ranks, flat, kind)
        else:
            self._in_parts(ranks, flat, kind)

    def _whole(self, ranks: Sequence[int], flat: Array, kind: int, rows: Mapping[int, Array] = _NO_ROWS) -> None:
        """Send the whole array from every rank to every other, then sum locally.

        This algorithm needs only one round of messages. For small arrays, the number of rounds determines the time.
        With `rows`, each rank also sends its own row, and receives the other ranks' rows into `rows`.
        """
        others = self._without_self(ranks)
        received = self._room(others, flat.dtype, len(flat))
        self._mesh.swap(dict.fromkeys(others, self._with_own(flat, rows)), _views(received, rows), kind)
        _add_in_order({**received, self._rank: flat}, flat)

    def _in_parts(self, ranks: Sequence[int], flat: Array, kind: int, rows: Mapping[int, Array] = _NO_ROWS) -> None:
        """Sum an array over `ranks`: reduce-scatter, then all-gather.

        Each rank sends about twice the array's bytes, for any number of ranks.
        """
        parts = _divided(flat, len(ranks))
        self._collect(ranks, ranks, parts, kind, rows)
        self._distribute(ranks, ranks, parts, kind)

    def _collect(
        self,
        ranks: Sequence[int],
        owners: Sequence[int],
        parts: Sequence[Array],
        kind: int,
        rows: Mapping[int, Array] = _NO_ROWS,
    ) -> None:
        """Reduce-scatter: each rank in `owners` receives its part of the array from all `ranks` and sums it.

        The `rows` are sent along as in `_whole`. This requires that all ranks are owners.
        """
        of_others = {owner: part for owner, part in zip(owners, parts, strict=True) if owner != self._rank}
        outgoing = {owner: self._with_own(part, rows) for owner, part in of_others.items()}
        if self._rank not in owners:
            self._mesh.swap(outgoing, {}, kind)
            return
        own = parts[owners.index(self._rank)]
        received = self._room(self._without_self(ranks), own.dtype, len(own))
        self._mesh.swap(outgoing, _views(received, rows), kind)
        if received:
            _add_in_order({**received, self._rank: own}, own)

    def _distribute(self, ranks: Sequence[int], owners: Sequence[int], parts: Sequence[Array], kind: int) -> None:
        """All-gather: each rank in `owners` sends its summed part of the array to all `ranks`."""
        incoming = {owner: as_bytes(part) for owner, part in zip(owners, parts, strict=True) if owner != self._rank}
        outgoing = {}
        if self._rank in owners:
            outgoing = dict.fromkeys(self._without_self(ranks), as_bytes(parts[owners.index(self._rank)]))
        self._mesh.swap(outgoing, incoming, kind)

    def _by_tree(self, ranks: Sequence[int], flat: Array, kind: int) -> None:
        """Sum an array up a tree of ranks to the first rank, then broadcast the sum down the tree.

        This algorithm takes few messages per rank.
        """
        above, below = tree(ranks, self._rank)
        if below:
            received = self._room(below, flat.dtype, len(flat))
            self._mesh.swap({}, _views(received), kind)
            _add_in_order({**received, self._rank: flat}, flat)
        if above is not None:
            self._mesh.swap({above: as_bytes(flat)}, {}, kind)
        self._spread(ranks, flat, kind)

    def _spread(self, ranks: Sequence[int], flat: Array, kind: int) -> None:
        """Broadcast an array from the first of `ranks` to the rest of `ranks`, in place."""
        above, passed_on = tree(ranks, self._rank)
        if above is not None:
            self._mesh.swap({}, {above: as_bytes(flat)}, kind)
        if passed_on:
            self._mesh.swap(dict.fromkeys(passed_on, as_bytes(flat)), {}, kind)

    # ------------------------------------------------------------------------------------ buffers

    def _with_own(self, flat: Array, rows: Mapping[int, Array]) -> Message:
        """Return the array as a message. If there are rows, append this rank's row to the message."""
        return (as_bytes(flat), as_bytes(rows[self._rank])) if rows else as_bytes(flat)

    def _without_self(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self._rank]

    def _room(self, ranks: Collection[int], dtype: np.dtype[Any], num_numbers: int) -> dict[int, Array]:
        """Return a receive buffer for each rank.

        Later calls reuse the memory, because allocating it takes as long as a sum.
        """
        num_bytes = num_numbers * dtype.itemsize
        if len(self._scratch) < num_bytes * len(ranks):
            self._scratch = np.empty(num_bytes * len(ranks), np.uint8)
        pieces = self._scratch[: num_bytes * len(ranks)].reshape(len(ranks), num_bytes)
        return {rank: piece.view(dtype) for rank, piece in zip(ranks, pieces, strict=True)}


def as_bytes(row: Array) -> memoryview:
    """Return a view of the array as bytes. Cast in NumPy, because `memoryview` does not support all dtypes."""
    return row.view(np.uint8).data


def _views(arrays: Mapping[int, Array], rows: Mapping[int, Array] = _NO_ROWS) -> dict[int, Message]:
    if rows:
        return {rank: (as_bytes(array), as_bytes(rows[rank])) for rank, array in arrays.items()}
    return {rank: as_bytes(array) for rank, array in arrays.items()}


def _divided(flat: Array, num_parts: int) -> list[Array]:
    bounds = [len(flat) * index // num_parts for index in range(num_parts + 1)]
    return [flat[start:stop] for start, stop in itertools.pairwise(bounds)]


def doubled(size: int) -> list[int]:
    """Return the powers of two below `size`."""
    return [1 << exponent for exponent in range((size - 1).bit_length())]


def _add_in_order(terms: Mapping[int, Array], target: Array) -> None:
    """Sum arrays in rank order into `target`.

    Args:
        terms: The arrays to sum, by rank.
        target: The array to hold the sum. It must be one of the terms.
    """
    first, second, *more = (terms[rank] for rank in sorted(terms))
    total = target if not more or target is first or target is second else first
    np.add(first, second, out=total)
    for term in more:
        np.add(total, term, out=total)
    if total is not target:
        target[:] = total


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
