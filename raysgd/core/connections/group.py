"""Collectives on NumPy arrays over a mesh (sockets between all pairs of ranks).

For small arrays, these collectives are ten times faster than gloo's.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from raysgd.core.connections.mesh.board import others
from raysgd.core.connections.mesh.meeting import has_names
from raysgd.core.connections.mesh.mesh import Bytes, Mesh
from raysgd.core.connections.mesh.sums import MOST, PIECE_BYTES, Chain, Nodes, RankSums, as_bytes, doubled
from raysgd.core.engine.shared.types import LOOPBACK, World

Array = np.ndarray[Any, np.dtype[Any]]
Gather = Callable[[Array], list[Array]]
"""An all-gather: takes this rank's array, and returns the arrays of all ranks, which have the same shape."""

_SUM, _ALL, _FIRST, _VALUE, _SUM_AND_ROW = range(5)  # types of collectives
_QUICK_BYTES_OF_MANY = 8 * 2**20
"""Largest array for which a sum over more than `MOST` ranks is faster than gloo's.

With up to `MOST` ranks, sums of any size are faster, as measured by `examples/benchmarks/small_sums.py`.
"""

_QUICK_BYTES_AT_PORTS = 2**20
"""Largest array for which a sum is faster than gloo's if more than two ranks are on one node without Unix sockets."""


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
        self._others = sorted(others(world.rank, world.size))
        self._nodes = Nodes(tuple(hosts) or (LOOPBACK,) * world.size)
        self._adding = RankSums(world.rank, self._mesh, self._nodes)
        self._scratch = np.empty(0, np.uint8)
        self._sums: Array = np.empty(0)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited during collectives until other ranks started the same collective."""
        return self._mesh.waited_s

    def add_up(self, numbers: Array) -> None:
        """Sum `numbers` over all ranks, in place."""
        if self.size > 1:
            flat = _flat(numbers)
            self._adding.add_up(flat, _kind(_SUM, flat))

    def add_up_with(self, numbers: Array, row: Array) -> list[Array]:
        """Sum `numbers` over all ranks, in place, and gather every rank's row, in the same messages if possible.

        Args:
            numbers: The array to sum.
            row: An array of bytes, of the same length on each rank.

        Returns:
            Every rank's row, in rank order.
        """
        flat = _flat(numbers)
        if self.size > 1 and self._adding.can_carry(flat):
            return self._adding.add_up_with(flat, row, _kind(_SUM_AND_ROW, flat))
        rows = self.gather(row)
        self.add_up(numbers)
        return rows

    def add_rows(self, rows: Array, counts: Sequence[int]) -> Array:
        """Return the sum of all ranks' rows, added in rank order and, for each rank, in row order.

        The sum is bitwise identical on all ranks.

        Args:
            rows: This rank's rows, as a two-dimensional array, possibly with no rows.
            counts: Each rank's number of rows.

        Returns:
            The sum, in a buffer that the next call overwrites.
        """
        width = rows.shape[1]
        bounds = [width * rank // self.size for rank in range(self.size + 1)]
        parts = [np.ascontiguousarray(rows[:, start:stop]) for start, stop in itertools.pairwise(bounds)]
        own = bounds[self.rank + 1] - bounds[self.rank]
        received = self._buffers_for_rows(rows.dtype, counts, own)
        outgoing = {rank: as_bytes(_flat(parts[rank])) for rank in self._others if counts[self.rank]}
        buffers = {rank: as_bytes(_flat(buffer)) for rank, buffer in received.items()}
        self._mesh.swap(outgoing, buffers, _kind(_SUM, rows))
        received[self.rank] = parts[self.rank]
        if self._sums.shape != (width,) or self._sums.dtype != rows.dtype:
            self._sums = np.empty(width, rows.dtype)
        sums = self._sums
        target = sums[bounds[self.rank] : bounds[self.rank + 1]]
        terms = [row for rank in sorted(received) for row in received[rank]]
        target[:] = terms[0]
        for term in terms[1:]:
            np.add(target, term, out=target)
        places = {rank: as_bytes(sums[bounds[rank] : bounds[rank + 1]]) for rank in self._others}
        self._mesh.swap(dict.fromkeys(self._others, as_bytes(target)), places, _kind(_ALL, rows))
        return sums

    def _buffers_for_rows(self, dtype: np.dtype[Any], counts: Sequence[int], width: int) -> dict[int, Array]:
        """Return a buffer for each other rank that has rows, to receive `width` columns of that rank's rows.

        Later calls reuse the memory.
        """
        num_rows = sum(counts) - counts[self.rank]
        if len(self._scratch) < num_rows * width * dtype.itemsize:
            self._scratch = np.empty(num_rows * width * dtype.itemsize, np.uint8)
        free = self._scratch[: num_rows * width * dtype.itemsize].view(dtype).reshape(num_rows, width)
        buffers, start = {}, 0  # `np.split` takes 25 times as long
        for rank in self._others:
            if counts[rank]:
                buffers[rank] = free[start : start + counts[rank]]
                start += counts[rank]
        return buffers

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
        received = [own if rank == self.rank else np.empty_like(own) for rank in range(self.size)]
        buffers = {rank: as_bytes(_flat(received[rank])) for rank in self._others}
        self._mesh.swap(dict.fromkeys(self._others, as_bytes(_flat(own))), buffers, _kind(_ALL, own))
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
        else:
            self._adding.tell(flat, kind)

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
