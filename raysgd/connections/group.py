"""What ranks exchange as NumPy arrays, over a mesh: an order of magnitude quicker than gloo where arrays are small."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from raysgd.connections._chain import Chain
from raysgd.connections._mesh import Bytes, Mesh
from raysgd.engine.types import World

_SUM, _ALL, _FIRST, _VALUE = range(4)  # kinds of exchanges
_MAX_WHOLE_BYTES = 64 * 1024
"""Up to this size an array is added up by every rank for itself."""

Array = np.ndarray[Any, np.dtype[Any]]


class Group:
    """What the replicas exchange numbers through: sums over all ranks, values told and passed on.

    All ranks come to the same sums, to the bit: terms are added in the order of ranks.

    Args:
        world: The place among the replicas.
        mesh: The connections; None for a replica that is alone.
    """

    def __init__(self, world: World, mesh: Mesh | None = None) -> None:
        self.rank, self.size = world.rank, world.size
        self._connections = mesh
        self._others = [rank for rank in range(world.size) if rank != world.rank]
        self._scratch = np.empty(0, np.uint8)
        self._sums: Array = np.empty(0)

    @property
    def _mesh(self) -> Mesh:
        assert self._connections is not None, "a group of several ranks needs connections"
        return self._connections

    def add_up(self, numbers: Array) -> None:
        """Puts the sums over all ranks into `numbers`."""
        if self.size > 1:
            flat = _flat(numbers)
            if flat.nbytes <= _MAX_WHOLE_BYTES:
                self._add_up_whole(flat)
            else:
                self._add_up_in_parts(flat)

    def _add_up_whole(self, flat: Array) -> None:
        """Every rank sends everything to every other: one wait for others, which is what small arrays cost."""
        received = self._room(flat.dtype, len(flat))
        own, rooms = _bytes(flat), {rank: _bytes(room) for rank, room in received.items()}
        self._mesh.swap(dict.fromkeys(self._others, own), rooms, _kind(_SUM, flat))
        _add_in_order({**received, self.rank: flat}, flat)

    def _add_up_in_parts(self, flat: Array) -> None:
        """Each rank adds up a part of the array, then sends the sums to all: twice the array travels, however many."""
        bounds = [len(flat) * rank // self.size for rank in range(self.size + 1)]
        parts = [flat[start:stop] for start, stop in itertools.pairwise(bounds)]
        views = [_bytes(part) for part in parts]
        own = parts[self.rank]
        received = self._room(flat.dtype, len(own))
        rooms = {rank: _bytes(room) for rank, room in received.items()}
        of_others = {rank: views[rank] for rank in self._others}
        self._mesh.swap(of_others, rooms, _kind(_SUM, flat))
        _add_in_order({**received, self.rank: own}, own)
        self._mesh.swap(dict.fromkeys(self._others, views[self.rank]), of_others, _kind(_ALL, flat))

    def add_rows(self, rows: Array, counts: Sequence[int]) -> Array:
        """The sum of all ranks' rows, added in the order of ranks and rows, to the same bits on all of them.

        Args:
            rows: This rank's, as many as `counts` says for it; maybe none.
            counts: How many rows each rank has.

        Returns:
            Memory that the next call uses again.
        """
        width = rows.shape[1]
        bounds = [width * rank // self.size for rank in range(self.size + 1)]
        parts = [np.ascontiguousarray(rows[:, start:stop]) for start, stop in itertools.pairwise(bounds)]
        own = bounds[self.rank + 1] - bounds[self.rank]
        received = self._rooms_for_rows(rows.dtype, counts, own)
        outgoing = {rank: _bytes(_flat(parts[rank])) for rank in self._others if counts[self.rank]}
        rooms = {rank: _bytes(_flat(room)) for rank, room in received.items()}
        self._mesh.swap(outgoing, rooms, _kind(_SUM, rows))
        received[self.rank] = parts[self.rank]
        if self._sums.shape != (width,) or self._sums.dtype != rows.dtype:
            self._sums = np.empty(width, rows.dtype)
        sums = self._sums
        target = sums[bounds[self.rank] : bounds[self.rank + 1]]
        terms = [row for rank in sorted(received) for row in received[rank]]
        target[:] = terms[0]
        for term in terms[1:]:
            np.add(target, term, out=target)
        places = {rank: _bytes(sums[bounds[rank] : bounds[rank + 1]]) for rank in self._others}
        self._mesh.swap(dict.fromkeys(self._others, _bytes(target)), places, _kind(_ALL, rows))
        return sums

    def _rooms_for_rows(self, dtype: np.dtype[Any], counts: Sequence[int], width: int) -> dict[int, Array]:
        """Room for the parts of the other ranks' rows, in memory that is used again."""
        num_rows = sum(counts) - counts[self.rank]
        if len(self._scratch) < num_rows * width * dtype.itemsize:
            self._scratch = np.empty(num_rows * width * dtype.itemsize, np.uint8)
        free = self._scratch[: num_rows * width * dtype.itemsize].view(dtype).reshape(num_rows, width)
        rooms, start = {}, 0
        for rank in self._others:
            if counts[rank]:
                rooms[rank] = free[start : start + counts[rank]]
                start += counts[rank]
        return rooms

    def _room(self, dtype: np.dtype[Any], num_numbers: int) -> dict[int, Array]:
        """An array for each other rank, in memory that is used again: fresh memory costs as much as the sum."""
        num_bytes = num_numbers * dtype.itemsize
        if len(self._scratch) < num_bytes * len(self._others):
            self._scratch = np.empty(num_bytes * len(self._others), np.uint8)
        starts = range(0, num_bytes * len(self._others), num_bytes) if num_bytes else [0] * len(self._others)
        return {
            rank: self._scratch[start : start + num_bytes].view(dtype)
            for rank, start in zip(self._others, starts, strict=True)
        }

    def gather(self, numbers: Array) -> list[Array]:
        """Every rank's array, all of one shape, by rank."""
        if self.size == 1:
            return [numbers]
        own = np.ascontiguousarray(numbers).reshape(numbers.shape)  # NumPy makes a row of a single number
        received = [own if rank == self.rank else np.empty_like(own) for rank in range(self.size)]
        rooms = {rank: _bytes(_flat(received[rank])) for rank in self._others}
        self._mesh.swap(dict.fromkeys(self._others, _bytes(_flat(own))), rooms, _kind(_ALL, own))
        return received

    def gather_rows(self, rows: Array, counts: Sequence[int]) -> Array:
        """All ranks' rows one behind the other; `counts` says how many each rank has."""
        padded = np.zeros((max(counts), *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        parts = self.gather(padded)
        return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        return max(float(one[0]) for one in self.gather(np.array([number], np.float64)))

    def from_first(self, numbers: Array) -> None:
        """Puts rank 0's into `numbers`."""
        if self.size > 1:
            view, kind = _bytes(_flat(numbers)), _kind(_FIRST, numbers)
            if self.rank == 0:
                self._mesh.swap(dict.fromkeys(self._others, view), {}, kind)
            else:
                self._mesh.swap({}, {0: view}, kind)

    def send(self, value: Any, takers: Sequence[int]) -> None:
        """Sends anything that can be pickled to `takers`, which must all `receive` it at this time."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self.send_parts([memoryview(head), *(buffer.raw() for buffer in buffers)], takers)

    def receive(self, source: int, takers: Sequence[int]) -> Any:
        """What `source` sends to `takers`, of which this rank is one."""
        head, *buffers = self.receive_parts(source, takers)
        return pickle.loads(head.data, buffers=buffers)

    def send_parts(self, parts: Sequence[Bytes], takers: Sequence[int]) -> None:
        """Sends some bytes to `takers`, which must all `receive_parts` at this time."""
        if takers:
            chain = self._chain(self.rank, takers)
            chain.pass_on(_bytes(np.array([len(parts)], np.int64)))
            chain.pass_on(_bytes(np.array([len(part) for part in parts], np.int64)))
            chain.pass_on(*parts)

    def receive_parts(self, source: int, takers: Sequence[int]) -> list[Array]:
        """What `source` sends to `takers`, as rows of bytes."""
        chain = self._chain(source, takers)
        count = np.zeros(1, np.int64)
        chain.pass_on(_bytes(count))
        sizes = np.zeros(count[0], np.int64)
        chain.pass_on(_bytes(sizes))
        parts = [np.empty(size, np.uint8) for size in sizes]
        chain.pass_on(*map(_bytes, parts))
        return parts

    def _chain(self, source: int, takers: Sequence[int]) -> Chain:
        return Chain(partial(self._mesh.swap, kind=_VALUE), self.rank, source, takers)


class Votes:
    """Whether any rank says yes, asked ahead of the answer. All ranks ask the same questions in the same order."""

    def __init__(self, world: World, mesh: Mesh) -> None:
        self._mesh = mesh
        self._others = [rank for rank in range(world.size) if rank != world.rank]
        self._num_asked = self._num_heard = 0

    def ask(self, says_yes: bool) -> Vote:
        """Says what this rank says; the answer is there when all ranks have."""
        self._mesh.swap(dict.fromkeys(self._others, memoryview(bytes([says_yes]))), {})
        self._num_asked += 1
        return Vote(self, self._num_asked, says_yes)

    def hear(self, number: int) -> bool:
        """Whether another rank said yes to question `number`, counted from 1.

        Answers before that one were not wanted any more, as when a `fit` ends before its data does.
        """
        while True:
            heard = {rank: bytearray(1) for rank in self._others}
            self._mesh.swap({}, {rank: memoryview(word) for rank, word in heard.items()})
            self._num_heard += 1
            if self._num_heard == number:
                return any(word[0] for word in heard.values())


@dataclass(frozen=True)
class Vote:
    """One question."""

    votes: Votes
    number: int
    own: bool

    def result(self) -> bool:
        """Waits for all ranks; to be asked for once."""
        return self.votes.hear(self.number) or self.own


def _kind(exchange: int, numbers: Array) -> int:
    """What is exchanged and how, as one number: ranks that differ in it would take each other's numbers for others."""
    return exchange << 16 | ord(numbers.dtype.kind) << 8 | numbers.dtype.itemsize & 0xFF


def _flat(array: Array) -> Array:
    """The same memory as a row."""
    assert array.flags.c_contiguous, "an array with gaps cannot be exchanged in place"
    return array.reshape(-1)


def _bytes(row: Array) -> memoryview:
    """The same memory as bytes; NumPy knows kinds of numbers that `memoryview` does not."""
    return row.view(np.uint8).data


def _add_in_order(terms: Mapping[int, Array], target: Array) -> None:
    """Puts the sum of the terms, added in the order of ranks, into `target`, which is one of them."""
    first, second, *more = (terms[rank] for rank in sorted(terms))
    total = target if not more or target is first or target is second else first
    np.add(first, second, out=total)
    for term in more:
        np.add(total, term, out=total)
    if total is not target:
        target[:] = total
