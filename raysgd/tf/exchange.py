"""What replicas exchange, as NumPy arrays: sums over all ranks, and the flat buffer in which gradients travel."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from raysgd.engine.types import World

_ALIGNMENT = 64
"""Bytes to whose multiple every gradient starts in the buffer: TensorFlow then uses it where it lies."""

Array = np.ndarray[Any, np.dtype[Any]]


class Group:
    """What the replicas exchange numbers through: the default process group; nothing for a replica that is alone.

    Args:
        world: The place among the replicas.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size

    def add_up(self, numbers: Array) -> None:
        """Puts the sums over all ranks into `numbers`."""
        if self.size > 1:
            import torch

            torch.distributed.all_reduce(torch.from_numpy(numbers))

    def gather(self, numbers: Array) -> list[Array]:
        """Every rank's array, all of one shape, by rank."""
        if self.size == 1:
            return [numbers]
        import torch

        received = [torch.empty(numbers.shape, dtype=torch.from_numpy(numbers).dtype) for _ in range(self.size)]
        torch.distributed.all_gather(received, torch.from_numpy(np.ascontiguousarray(numbers)))
        return [tensor.numpy() for tensor in received]

    def gather_rows(self, rows: Array, counts: Sequence[int]) -> Array:
        """All ranks' rows one behind the other, of which each rank has as many as `counts` says."""
        padded = np.zeros((max(counts), *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        parts = self.gather(padded)
        return np.concatenate([part[:count] for part, count in zip(parts, counts, strict=True)])

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        import torch

        tensor = torch.tensor(number, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return float(tensor)

    def from_first(self, numbers: Array) -> None:
        """Puts rank 0's into `numbers`."""
        if self.size > 1:
            import torch

            torch.distributed.broadcast(torch.from_numpy(numbers), 0)

    def send(self, value: Any, ranks: Iterable[int]) -> None:
        """Sends anything that can be pickled to `ranks`, which must all `receive` it at this time."""
        import torch

        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        views = [memoryview(bytearray(head)), *(buffer.raw() for buffer in buffers)]
        parts: list[Array] = [np.frombuffer(view, np.uint8) for view in views]
        sizes = np.array([len(part) for part in parts], np.int64)
        for rank in ranks:
            for part in (np.array([len(parts)], np.int64), sizes, *(part for part in parts if len(part))):
                torch.distributed.send(torch.from_numpy(part if part.flags.writeable else part.copy()), rank)

    def receive(self, source: int) -> Any:
        """What `source` sends."""
        (num_parts,) = self._received(np.zeros(1, np.int64), source)
        sizes = self._received(np.zeros(num_parts, np.int64), source)
        head, *buffers = [self._received(np.zeros(size, np.uint8), source) for size in sizes]
        return pickle.loads(head.data, buffers=buffers)

    def _received(self, part: Array, source: int) -> Array:
        import torch

        if len(part):
            torch.distributed.recv(torch.from_numpy(part), source)
        return part


class Layout:
    """Where the gradients of a step lie in the buffer; the last number is the weight.

    Buffers are used again once nobody looks into them any more.
    """

    def __init__(self, gradients: Sequence[Array]) -> None:
        self._dtype = np.dtype(np.float64 if any(g.dtype == np.float64 for g in gradients) else np.float32)
        step = _ALIGNMENT // self._dtype.itemsize
        self._shapes = [gradient.shape for gradient in gradients]
        self._dtypes = [gradient.dtype for gradient in gradients]
        self._slices = []
        end = 0
        for gradient in gradients:
            self._slices.append(slice(end, end + gradient.size))
            end += -(-gradient.size // step) * step
        self._num_numbers = end + 1
        self._buffers: list[Buffer] = []

    def take(self) -> Array:
        """A buffer of which nobody has a view."""
        free = next((buffer for buffer in self._buffers if buffer.is_free), None)
        if free is None:
            free = Buffer(self._num_numbers, self._dtype)
            self._buffers.append(free)
        return free.numbers

    def fill(self, buffer: Array, gradients: Sequence[Array], weight: float) -> None:
        """Copies the gradients in, times the weight. What has no weight does not count, whatever it is, also NaN."""
        if not weight:
            buffer[:] = 0
            return
        for gradient, place in zip(gradients, self._slices, strict=True):
            np.multiply(gradient.reshape(-1), weight, out=buffer[place], casting="unsafe", dtype=self._dtype)
        buffer[-1] = weight

    def split(self, buffer: Array) -> list[Array]:
        """The gradients: views of the buffer where their kind of number is the buffer's."""
        return [
            buffer[place].reshape(shape).astype(dtype, copy=False)
            for place, shape, dtype in zip(self._slices, self._shapes, self._dtypes, strict=True)
        ]


class Buffer:
    """Aligned memory that knows whether anybody but itself refers to it."""

    def __init__(self, num_numbers: int, dtype: np.dtype[Any]) -> None:
        num_bytes = num_numbers * dtype.itemsize
        self._memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)  # what every view, also of a view, refers to
        start = -self._memory.ctypes.data % _ALIGNMENT
        self.numbers: Array = self._memory[start : start + num_bytes].view(dtype)
        self._num_own_references = self._num_references

    @property
    def is_free(self) -> bool:
        return self._num_references == self._num_own_references

    @property
    def _num_references(self) -> int:
        return sys.getrefcount(self._memory) + sys.getrefcount(self.numbers)
