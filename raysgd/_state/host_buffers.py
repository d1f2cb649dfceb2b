"""Host memory for copies of states, kept when a copy is gone because its pages are there already the next time.

The first touch of a page costs several times as much as the copy into it. (Huge pages are no way around it: to find
room for them can take longer than all the small ones.)
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import finalize

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MAX_BUFFERS = 2
"""The number of those that are kept: one holds the last copy while the next one is written to the other."""

_M_MMAP_THRESHOLD = -3  # in `malloc.h` of the GNU C library
_LARGE_BYTES = 2**17  # parts of parameters of 1 MiB, on eight workers


@cache
def return_large_blocks() -> None:
    """From now on this process returns memory of 128 KiB and more to the system as soon as it is free.

    The C library would keep it for the next time. Where small pieces that stay are taken from it meanwhile, it is too
    small the next time, so that more and more is kept.
    """
    with suppress(OSError, AttributeError):  # another C library, which does what it does
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class HostBuffers:
    """Memory that comes back by itself when the last view of it is gone."""

    def __init__(self) -> None:
        self._spare: list[_Memory] = []
        self._lent: set[int] = set()  # identities, because several threads may give back at once

    def take_buffer(self, num_bytes: int, *, pinned: bool = False) -> Bytes:
        """Return that many bytes, whatever is in them. A GPU writes into `pinned` memory directly."""
        fitting = (each for each in self._spare if each.num_bytes >= num_bytes and each.is_pinned == pinned)
        memory = next(fitting, None)
        if memory is None:
            self._spare.clear()  # Too small, or of the other kind. Before the new one is there.
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
        """Called in whichever thread let go of the last view."""
        self._lent.discard(id(memory))
        if len(self._lent) + len(self._spare) < _MAX_BUFFERS:
            self._spare.append(memory)


class _Memory:
    """Some memory, ordinary or such as the system never moves."""

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.num_bytes, self.is_pinned = num_bytes, is_pinned
        if is_pinned:
            import torch

            self._content: Any = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._content = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def view(self) -> Bytes:
        """A new array over all of it."""
        content: Bytes = self._content.numpy() if self.is_pinned else np.frombuffer(self._content, dtype=np.uint8)
        return content
