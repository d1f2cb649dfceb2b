"""`fold521-sha256`, the checksum in checkpoint files of earlier versions: only for reading them.

The bytes are read as little-endian 64-bit words in rows of 521. Every 503 rows are folded into one, the sum of their
words modulo 2**64 column by column, and SHA-256 is taken over the folded rows and the number of bytes.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROW_BYTES = 8 * 521
_BLOCK_BYTES = 503 * _ROW_BYTES


class FormerChecksum:
    """Used as the objects of `hashlib` are."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self._block = bytearray()

    def update(self, content: memoryview | bytes) -> None:
        """Adds bytes."""
        view = memoryview(content).cast("B")
        self._num_bytes += len(view)
        while view:
            part = view[: _BLOCK_BYTES - len(self._block)]
            self._block += part
            view = view[len(part) :]
            if len(self._block) == _BLOCK_BYTES:
                self._fold()

    def hexdigest(self) -> str:
        """The checksum of all bytes. Add none afterwards."""
        if self._block:
            self._fold()
        self._hash.update(self._num_bytes.to_bytes(8, "little"))
        return self._hash.hexdigest()

    def _fold(self) -> None:
        whole = self._block.ljust(-(-len(self._block) // _ROW_BYTES) * _ROW_BYTES, b"\0")
        rows = np.frombuffer(whole, "<u8").reshape(-1, _ROW_BYTES // 8)
        self._hash.update(np.add.reduce(rows, axis=0).data)
        self._block = bytearray()
