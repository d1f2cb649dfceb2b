"""Presents a board (raysgd's key-value store of a group) to PyTorch as a `torch.distributed` store.

Through such a store, the ranks of a process group find each other.

PyTorch's own `TCPStore` accepts connections from any process, dies with its host, and looks up each client's host name.
Without a name server, these lookups take long for many clients at once.

This module imports PyTorch. Import this module only in processes that use PyTorch anyway.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from raysgd.core.connections.mesh.board import Board, BoardTimeout


class BoardStore(dist.Store):  # type: ignore[name-defined,misc]
    """A `torch.distributed` store with the operations that gloo uses. Its values are stored on a board.

    PyTorch's C++ code also calls these operations. It passes the process group's timeout to `wait`. Without a timeout,
    operations wait up to the store's `timeout`, for which PyTorch's default is 5 minutes.

    Args:
        board: Board that holds the values.
        longest_wait_s: Upper limit for each wait, even if the timeout is longer.
    """

    def __init__(self, board: Board, longest_wait_s: float = math.inf) -> None:
        super().__init__()
        self._board = board
        self.longest_wait_s = longest_wait_s

    def set(self, key: str, value: str | bytes) -> None:
        self._board.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._board.get(key, 0.0)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._board.get(key, 0.0) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Raise an error. The store has no counters, because counters would need one rank to act as a server."""
        raise NotImplementedError(
            "the store of this process group has no counters. Create groups without `use_local_synchronization=True`, "
            "and leave the variable `TORCH_DIST_INIT_BARRIER` unset."
        )

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        timeout_s = (self.timeout if timeout is None else timeout).total_seconds()
        try:
            self._board.wait(list(keys), min(timeout_s, self.longest_wait_s))
        except BoardTimeout as error:
            raise dist.DistStoreError(f"wait timeout: {error}") from error  # the error that PyTorch expects

    def check(self, keys: Sequence[str]) -> bool:
        return self._board.has(keys)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Any:
        return self
