"""A stand-in for a dataset of Ray Data, where no Ray is needed to see what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np


class Rows:
    """As much of a dataset of Ray Data as is used, with its rows in order already."""

    def __init__(self, rows: list[int], size: int = 0) -> None:
        self.rows, self.size = rows, size
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=True))

    def repartition(self, *, target_num_rows_per_block: int, strict: bool = False) -> Rows:
        assert strict
        return Rows(self.rows, target_num_rows_per_block)

    def streaming_split(self, n: int, *, equal: bool) -> list[Rows]:
        assert not equal
        blocks = [self.rows[start : start + self.size] for start in range(0, len(self.rows), self.size)]
        return [Rows([row for block in blocks[rank::n] for row in block]) for rank in range(n)]

    def iterator(self) -> Rows:
        return self

    def iter_batches(self, *, batch_size: int, batch_format: str, prefetch_batches: int) -> Iterator[dict[str, Any]]:
        assert (batch_format, prefetch_batches) == ("numpy", 1)
        for start in range(0, len(self.rows), batch_size):
            yield {"id": np.array(self.rows[start : start + batch_size])}
