"""`HuggingFaceStream`: a dataset of `datasets` that is streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from raysgd.streams.stream import Shard, Stream, from_row


class HuggingFaceStream(Stream):
    """Rows of a `datasets.IterableDataset`, in its shards.

    Shuffle with `Stream.shuffle` instead of the dataset's own `shuffle`: that one ends at the border of a shard. A
    shard is read from its beginning to get to a row in the middle.

    Args:
        dataset: What `load_dataset(..., streaming=True)` or `dataset.to_iterable_dataset(num_shards=...)` returned.

    Raises:
        TypeError: It is something else.
    """

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "n_shards") or not hasattr(dataset, "shard"):
            raise TypeError(
                f"`HuggingFaceStream` got a `{type(dataset).__name__}`: need a `datasets.IterableDataset`, as "
                "`load_dataset(..., streaming=True)` returns it for a split."
            )
        self._dataset = dataset

    def shards(self) -> Sequence[Shard]:
        return [Shard(f"shard-{index}") for index in range(self._dataset.n_shards)]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        index = int(shard.rpartition("-")[2])
        return from_row(iter(self._dataset.shard(num_shards=self._dataset.n_shards, index=index)), start)
