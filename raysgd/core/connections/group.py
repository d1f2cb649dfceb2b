"""Collectives on NumPy arrays over a mesh (sockets between all pairs of ranks).

For small arrays, these collectives are ten times faster than gloo's.

Sums are bitwise identical on all ranks, because each part of a sum is either computed by one rank and sent to the
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
import math
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from raysgd.core.connections.mesh.board import others
from raysgd.core.connections.mesh.meeting import has_names
from raysgd.core.connections.mesh.mesh import Bytes, Mesh, Message
from raysgd.core.connections.mesh.routes import PIECE_BYTES, Chain, Nodes, doubled, tree
from raysgd.core.engine.shared.types import LOOPBACK, World

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Gather = Callable[[Array], list[Array]]
"""An all-gather: takes this rank's array, and returns the arrays of all ranks, which have the same shape."""

_SUM, _ALL, _FIRST, _VALUE, _SUM_AND_ROW = range(5)  # types of collectives
MOST = 8
"""Maximum number of ranks for which no sum uses a tree. Among more ranks, small arrays are summed up a tree."""

MAX_WHOLE_BYTES = 64 * 1024
"""Maximum size in bytes of an array that each rank sends whole to the other ranks, instead of in parts."""

LEAST_PART_BYTES = 8 * 1024
"""Part size in bytes above which a sum's time depends more on the amount of data than on the number of messages."""

_QUICK_BYTES_OF_MANY = 8 * 2**20
"""Largest array for which a sum over more than `MOST` ranks is faster than gloo's.

With up to `MOST` ranks, sums of any size are faster, as measured by `examples/benchmarks/small_sums.py`.
"""

_QUICK_BYTES_AT_PORTS = 2**20
"""Largest array for which a sum is faster than gloo's if more than two ranks are on one node without Unix sockets."""
_NO_ROWS: Mapping[int, Array] = {}


class Group:
    """One rank's object for collectives with all other ranks: sums, gathers and broadcasts.

    Sums are bitwise identical on all ranks. With up to eight ranks, all on one node, arrays are summed in rank order.

    Args:
        world: This rank and the size of the group.
        mesh: Connections to the other ranks, or None if there is only one rank.
        hosts: The address of each rank's node, by rank. Empty if all ranks are on one node.
    """

    def __init__(self, world: World, mesh: Mesh | None = None, hosts: Sequence[str] = ()) -> None:
        self.rank, self.size = world.rank, world.size
        self._mesh = mesh or Mesh({}, math.inf)
        self._all, self._others = range(world.size), sorted(others(world.rank, world.size))
        self._nodes = Nodes(tuple(hosts) or (LOOPBACK,) * world.size)
        self._beside = self._nodes.beside(world.rank)
        self._scratch = np.empty(0, np.uint8)
        self._sums: Array = np.empty(0)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited during collectives until other ranks started the same collective."""
        return self._mesh.waited_s

    def add_up(self, numbers: Array) -> None:
        """Sum `numbers` over all ranks, in place."""
        flat = _flat(numbers)
        kind, is_small = _kind(_SUM, flat), flat.nbytes <= MAX_WHOLE_BYTES
        if not self._nodes.are_shared or (is_small and self.size <= MOST):
            self._among(self._all, flat, kind, is_small)
        elif is_small:
            self._by_leaders(flat, kind)
        else:
            self._by_columns(flat, kind)

    def add_up_with(self, numbers: Array, row: Array) -> list[Array]:
        """Sum `numbers` over all ranks, in place, and gather every rank's row, in the same messages if possible.

        Args:
            numbers: The array to sum.
            row: An array of bytes, of the same length on each rank.

        Returns:
            Every rank's row, in rank order.
        """
        flat = _flat(numbers)
        is_small = flat.nbytes <= MAX_WHOLE_BYTES
        if 1 < self.size <= MOST and (is_small or not self._nodes.are_shared):
            rows = {rank: row if rank == self.rank else np.empty_like(row) for rank in self._all}
            self._in_parts(self._all, flat, _kind(_SUM_AND_ROW, flat), is_small, rows)
            return list(rows.values())
        gathered = self.gather(row)
        self.add_up(numbers)
        return gathered

    def add_rows(self, rows: Array, counts: Sequence[int]) -> Array:
        """Return the sum of all ranks' rows, added in rank order and, for each rank, in row order.

        The sum is bitwise identical on all ranks.

        Args:
            rows: This rank's rows, as a two-dimensional array, possibly with no rows.
            counts: Each rank's number of rows.

        Returns:
            The sum, in a buffer that the next call overwrites.
        """
        parts = [np.ascontiguousarray(part.T) for part in _divided(rows.T, self.size)]
        width = parts[self.rank].shape[1]
        received = self._room({rank: counts[rank] * width for rank in self._others if counts[rank]}, rows.dtype)
        outgoing = {rank: as_bytes(_flat(parts[rank])) for rank in self._others if counts[self.rank]}
        self._mesh.swap(outgoing, _views(received), _kind(_SUM, rows))
        terms_of = {rank: buffer.reshape(counts[rank], width) for rank, buffer in received.items()}
        terms_of[self.rank] = parts[self.rank]
        if self._sums.shape != rows.shape[1:] or self._sums.dtype != rows.dtype:
            self._sums = np.empty(rows.shape[1], rows.dtype)
        sums = _divided(self._sums, self.size)
        terms = [row for rank in sorted(terms_of) for row in terms_of[rank]]
        sums[self.rank][:] = terms[0]
        for term in terms[1:]:
            np.add(sums[self.rank], term, out=sums[self.rank])
        self._distribute(self._all, self._all, sums, _kind(_ALL, rows))
        return self._sums

    def is_quick_for(self, num_bytes: int) -> bool:
        """Return True if this class sums an array of this size at least as fast as gloo.

        All ranks get the same result.
        """
        if self.size > 2 and len(self._nodes.ranks) == 1 and not has_names(self._nodes.hosts[0]):
            return num_bytes <= _QUICK_BYTES_AT_PORTS
        return self.size <= MOST or num_bytes <= _QUICK_BYTES_OF_MANY

    def gather(self, numbers: Array) -> list[Array]:
        """Return the arrays of all ranks, in rank order (an all-gather). All arrays must have the same shape."""
        if self.size == 1:
            return [numbers]
        own = np.ascontiguousarray(numbers).reshape(numbers.shape)  # NumPy turns 0-d arrays into 1-d; undo that
        if self.size > MOST:
            return self._gathered_in_rounds(own)
        received = [own if rank == self.rank else np.empty_like(own) for rank in self._all]
        self._distribute(self._all, self._all, [_flat(each) for each in received], _kind(_ALL, own))
        return received

    def _gathered_in_rounds(self, own: Array) -> list[Array]:
        """All-gather the ranks' arrays in log2 N rounds of messages.

        In each round, a rank sends all arrays that it has so far to another rank. In the last round, it leaves out
        those that the other rank already has. The distance between the two ranks doubles with each round.
        """
        parts = np.empty((self.size, *own.shape), own.dtype)  # in rank order, starting with this rank
        parts[0] = own
        for distance in doubled(self.size):
            count = min(distance, self.size - distance)
            before, after = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            outgoing, incoming = (as_bytes(_flat(part)) for part in (parts[:count], parts[distance : distance + count]))
            self._mesh.swap({before: outgoing}, {after: incoming}, _kind(_ALL, own))
        return [parts[(rank - self.rank) % self.size] for rank in range(self.size)]

    def gather_rows(self, rows: Array, counts: Sequence[int]) -> Array:
        """Concatenate the rows of all ranks into one array, in rank order.

        `counts` contains each rank's number of rows.
        """
        padded = np.zeros((max(counts), *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        parts = self.gather(padded)
        return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])

    def largest(self, number: float) -> float:
        """Return the maximum of `number` over all ranks."""
        return max(float(one[0]) for one in self.gather(np.array([number], np.float64)))

    def from_first(self, numbers: Array) -> None:
        """Broadcast the array of rank 0 to all ranks, in place."""
        if self.size == 1:
            return
        flat, kind = _flat(numbers), _kind(_FIRST, numbers)
        if flat.nbytes > PIECE_BYTES:
            first, *others = self._nodes.in_order
            Chain(partial(self._mesh.swap, kind=kind), self.rank, first, others).pass_on(as_bytes(flat))
            return
        # Each rank sends few messages, and the array is sent to each node only once.
        if self.rank in self._nodes.leaders:
            self._spread(self._nodes.leaders, flat, kind)
        self._spread(self._beside, flat, kind)

    def send(self, value: Any, takers: Sequence[int]) -> None:
        """Send a picklable value to the ranks `takers`. They must all call `receive` at the same time."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self.send_parts([memoryview(head), *(buffer.raw() for buffer in buffers)], takers)

    def receive(self, source: int, takers: Sequence[int]) -> Any:
        """Receive the value that rank `source` sends to the ranks `takers`. This rank must be one of them."""
        head, *buffers = self.receive_parts(source, takers)
        return pickle.loads(head.data, buffers=buffers)

    def send_parts(self, parts: Sequence[Bytes], takers: Sequence[int]) -> None:
        """Send several buffers to the ranks `takers`. They must all call `receive_parts` at the same time."""
        if takers:
            chain = self._chain(self.rank, takers)
            chain.pass_on(as_bytes(np.array([len(parts)], np.int64)))
            chain.pass_on(as_bytes(np.array([len(part) for part in parts], np.int64)))
            chain.pass_on(*parts)

    def receive_parts(self, source: int, takers: Sequence[int]) -> list[Array]:
        """Receive the buffers that rank `source` sends to the ranks `takers`. Return them as byte arrays."""
        chain = self._chain(source, takers)
        count = np.zeros(1, np.int64)
        chain.pass_on(as_bytes(count))
        sizes = np.zeros(count[0], np.int64)
        chain.pass_on(as_bytes(sizes))
        parts = [np.empty(size, np.uint8) for size in sizes]
        chain.pass_on(*map(as_bytes, parts))
        return parts

    def _chain(self, source: int, takers: Sequence[int]) -> Chain:
        return Chain(partial(self._mesh.swap, kind=_VALUE), self.rank, source, takers)

    # ------------------------------------------------------------------------------------ several nodes

    def _by_leaders(self, flat: Array, kind: int) -> None:
        """Sum an array within each node, then across the first ranks of the nodes.

        The first rank of each node then broadcasts the sum within its node.
        """
        beside = self._beside
        self._among(beside, flat, kind, is_small=True)
        if self.rank == beside[0]:
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
        if self.rank in owners:
            own = owners.index(self.rank)
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
        if len(ranks) > MOST and (is_small or flat.nbytes < LEAST_PART_BYTES * len(ranks)):
            self._by_tree(ranks, flat, kind)
        else:
            self._in_parts(ranks, flat, kind, is_small)

    def _in_parts(
        self,
        ranks: Sequence[int],
        flat: Array,
        kind: int,
        is_whole: bool,
        rows: Mapping[int, Array] = _NO_ROWS,
    ) -> None:
        """Sum an array over `ranks`: reduce-scatter, then all-gather.

        Each rank sends about twice the array's bytes, for any number of ranks. If `is_whole` is True, each rank sums
        the whole array instead of a part, which needs only one round of messages. For small arrays, the number of
        rounds determines the time. With `rows`, each rank also sends its own row, and receives the other ranks' rows
        into `rows`.
        """
        parts = [flat] * len(ranks) if is_whole else _divided(flat, len(ranks))
        self._collect(ranks, ranks, parts, kind, rows)
        if not is_whole:
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

        The `rows` are sent along as in `_in_parts`. This requires that all ranks are owners.
        """
        of_others = {owner: part for owner, part in zip(owners, parts, strict=True) if owner != self.rank}
        outgoing = {owner: self._with_own(part, rows) for owner, part in of_others.items()}
        if self.rank not in owners:
            self._mesh.swap(outgoing, {}, kind)
            return
        own = parts[owners.index(self.rank)]
        received = self._room(dict.fromkeys(self._without_self(ranks), len(own)), own.dtype)
        self._mesh.swap(outgoing, _views(received, rows), kind)
        if received:
            _add_in_order({**received, self.rank: own}, own)

    def _distribute(self, ranks: Sequence[int], owners: Sequence[int], parts: Sequence[Array], kind: int) -> None:
        """All-gather: each rank in `owners` sends its summed part of the array to all `ranks`."""
        incoming = {owner: as_bytes(part) for owner, part in zip(owners, parts, strict=True) if owner != self.rank}
        outgoing = {}
        if self.rank in owners:
            outgoing = dict.fromkeys(self._without_self(ranks), as_bytes(parts[owners.index(self.rank)]))
        self._mesh.swap(outgoing, incoming, kind)

    def _by_tree(self, ranks: Sequence[int], flat: Array, kind: int) -> None:
        """Sum an array up a tree of ranks to the first rank, then broadcast the sum down the tree.

        This algorithm takes few messages per rank.
        """
        above, below = tree(ranks, self.rank)
        if below:
            received = self._room(dict.fromkeys(below, len(flat)), flat.dtype)
            self._mesh.swap({}, _views(received), kind)
            _add_in_order({**received, self.rank: flat}, flat)
        if above is not None:
            self._mesh.swap({above: as_bytes(flat)}, {}, kind)
        self._spread(ranks, flat, kind)

    def _spread(self, ranks: Sequence[int], flat: Array, kind: int) -> None:
        """Broadcast an array from the first of `ranks` to the rest of `ranks`, in place."""
        above, passed_on = tree(ranks, self.rank)
        if above is not None:
            self._mesh.swap({}, {above: as_bytes(flat)}, kind)
        if passed_on:
            self._mesh.swap(dict.fromkeys(passed_on, as_bytes(flat)), {}, kind)

    # ------------------------------------------------------------------------------------ buffers

    def _with_own(self, flat: Array, rows: Mapping[int, Array]) -> Message:
        """Return the array as a message. If there are rows, append this rank's row to the message."""
        return (as_bytes(flat), as_bytes(rows[self.rank])) if rows else as_bytes(flat)

    def _without_self(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self.rank]

    def _room(self, lengths: Mapping[int, int], dtype: np.dtype[Any]) -> dict[int, Array]:
        """Return a receive buffer for that many numbers of each rank.

        Later calls reuse the memory, because allocating it takes as long as a sum.
        """
        num_bytes = sum(lengths.values()) * dtype.itemsize
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        free, buffers, start = self._scratch[:num_bytes].view(dtype), {}, 0  # `np.split` takes 25 times as long
        for rank, length in lengths.items():
            buffers[rank] = free[start : start + length]
            start += length
        return buffers


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


class EarlyVotes:
    """Votes without waiting: each rank says yes or no now, and checks later whether any rank said yes.

    Ranks use these votes to agree on whether any rank has data left. All ranks must vote on the same questions in the
    same order.
    """

    def __init__(self, world: World, mesh: Mesh) -> None:
        self._mesh, self._others = mesh, sorted(others(world.rank, world.size))
        self._own: deque[bool] = deque()
        self._num_asked = self._num_heard = 0

    def ask(self, says_yes: bool) -> Callable[[], bool]:
        """Send this rank's vote on the next question to the other ranks.

        Return a function that waits for all other votes and returns True if any rank said yes. Call that function only
        once.
        """
        self._mesh.swap(dict.fromkeys(self._others, memoryview(bytes([says_yes]))), {})
        self._own.append(says_yes)
        self._num_asked += 1
        return partial(self._hear, self._num_asked)

    def _hear(self, number: int) -> bool:
        """Return True if any rank said yes to the question with this number, counted from 1.

        Discard the votes on earlier questions if their results were never requested. That happens if Keras's `fit` ends
        before the data does.
        """
        while True:
            heard = {rank: bytearray(1) for rank in self._others}
            self._mesh.swap({}, {rank: memoryview(word) for rank, word in heard.items()})
            answer = self._own.popleft() or any(word[0] for word in heard.values())
            self._num_heard += 1
            if self._num_heard == number:
                return answer


def _kind(exchange: int, numbers: Array) -> int:
    """Return an integer that encodes the type of a collective and the array's dtype.

    Ranks compare this integer, because ranks in different collectives would misread each other's data.
    """
    return exchange << 16 | ord(numbers.dtype.kind) << 8 | numbers.dtype.itemsize & 0xFF


def _flat(array: Array) -> Array:
    """Return a one-dimensional view of the array.

    Raises:
        ValueError: The array's memory is not contiguous.
    """
    if not array.flags.c_contiguous:  # `reshape` would return a copy, so writing to it would not change the array
        raise ValueError(
            f"an array of shape {array.shape} with strides {array.strides} cannot be exchanged in place, because its "
            "memory is not contiguous. Pass `numpy.ascontiguousarray(array)`."
        )
    return array.reshape(-1)
