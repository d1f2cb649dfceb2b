"""Provides host memory for copies of training states and gradients.

Blocks of memory are reused, because their pages are already mapped.

The first access to a page costs several times as much as copying into it. Huge pages do not help, because finding free
huge pages can take longer than accessing all the small pages for the first time.
"""

from __future__ import annotations

import mmap
from typing import Any
from weakref import finalize

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MAX_BUFFERS = 2
"""Most buffers to retain: one holds the last copy while the next copy is written to the other."""


class HostBuffers:
    """Lends blocks of memory as arrays.

    A block can be reused once the last view of its array has been garbage collected.
    """

    def __init__(self) -> None:
        self._spare: list[_Memory] = []
        # Ids of blocks in use. Several threads may return blocks at the same time. This is safe, because removing an
        # entry from a set is atomic.
        self._lent: set[int] = set()

    def take_buffer(self, num_bytes: int, *, pinned: bool = False) -> Bytes:
        """Return an array of `num_bytes` uninitialized bytes.

        Args:
            num_bytes: Size of the array.
            pinned: True for pinned memory, into which a GPU can write directly.
        """
        fitting = (each for each in self._spare if each.num_bytes >= num_bytes and each.is_pinned == pinned)
        memory = next(fitting, None)
        if memory is None:
            self._spare.clear()  # these blocks do not fit, so free them before allocating
            memory = _Memory(num_bytes, pinned)
        else:
            self._spare.remove(memory)
        whole = memory.view()
        self._lent.add(id(memory))
        finalize(whole, self._give_back, memory).atexit = False
        content = whole[:num_bytes]
        assert content.base is whole, "every view, also of a view, must keep `whole` alive"
        return content

    def _give_back(self, memory: _Memory) -> None:
        """Keep a block for reuse, unless enough blocks are kept already.

        The thread that released the last view calls this method.
        """
        self._lent.discard(id(memory))
        if len(self._lent) + len(self._spare) < _MAX_BUFFERS:
            self._spare.append(memory)


class _Memory:
    """A block of ordinary or pinned memory."""

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.num_bytes, self.is_pinned = num_bytes, is_pinned
        if is_pinned:
            import torch

            self._content: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._content = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def view(self) -> Bytes:
        """Return a new NumPy array over the whole block."""
        return self._content.numpy() if self.is_pinned else np.frombuffer(self._content, dtype=np.uint8)
