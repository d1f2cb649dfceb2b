"""The flat buffer in which gradients travel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from raysgd.connections.group import Array

_ALIGNMENT = 64
"""Bytes to whose multiple every gradient starts in the buffer: TensorFlow then uses it where it lies."""


class GradientLayout:
    """The places of a step's gradients in the buffer; the last number is the weight.

    Buffers are used again once nothing refers to them.
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
        """A buffer without views."""
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
