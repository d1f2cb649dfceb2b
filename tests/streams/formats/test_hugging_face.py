"""`HuggingFaceStream`: the shards and rows of a streamed dataset."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.streams.formats.hugging_face import HuggingFaceStream
from tests.streams.made import joint, pass_of, read_together


def test_rows_are_those_of_the_dataset() -> None:
    datasets: Any = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"number": list(range(60))}).to_iterable_dataset(num_shards=5)
    stream = HuggingFaceStream(dataset)
    assert [shard.name for shard in stream.shards()] == [f"shard-{index}" for index in range(5)]
    steps = read_together(pass_of(stream.shuffle(70).map(lambda row: row["number"]).batch(7)), 3)
    assert sorted(row for step in steps for row in joint(step)) == list(range(60))
    assert [row["number"] for row in stream.open("shard-1", 10)] == [22, 23]
    with pytest.raises(ValueError, match="`start=13`: the shard has 12 rows only"):
        stream.open("shard-1", 13)


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a `list`: need a `datasets\.IterableDataset`"):
        HuggingFaceStream([1])
