"""Shards of data frames, to which a framework's dataset refers: what `TorchMLDataset` and `TFMLDataset` share."""

from __future__ import annotations

from typing import Any


class ShardedFrames:
    """Holds the data frames in shards, a `raysgd.util.data.MLDataset`."""

    def __init__(self, ds: Any) -> None:
        self._ds = ds

    def set_num_shards(self, num_shards: int) -> None:
        """Divides the data again if there are not as many shards."""
        if num_shards != self._ds.num_shards():
            self._ds = self._ds.repartition(num_shards)


def listed(given: Any) -> list[Any]:
    """One or several, as a list."""
    return list(given) if isinstance(given, list | tuple) else [given]
