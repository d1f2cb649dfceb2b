"""The flat buffer in which gradients travel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysgd._state.host_buffers import HostBuffers
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
        self._buffers = HostBuffers()

    def take(self) -> Array:
        """A buffer without views."""
        return self._buffers.take(self._num_numbers * self._dtype.itemsize).view(self._dtype)

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
