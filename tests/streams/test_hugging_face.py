"""`HuggingFaceStream`: the shards and rows of a streamed dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raysgd.streams.iterables import HuggingFaceStream
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


def test_a_process_that_has_read_a_row_gets_near_it_again_without_reading_the_shard(tmp_path: Any) -> None:
    datasets: Any = pytest.importorskip("datasets")

    def rows(shards: list[int]) -> Any:
        for shard in shards:
            for number in range(2000):
                yield {"number": 2000 * shard + number}

    dataset = datasets.Dataset.from_generator(rows, gen_kwargs={"shards": [0, 1]}, cache_dir=str(tmp_path))
    stream = HuggingFaceStream(dataset.to_iterable_dataset(num_shards=2))
    first = stream.open("shard-1", 0)
    for _ in range(1500):
        next(first)
    assert len(stream._states["shard-1"]) == 4
    assert [row["number"] for row in stream.open("shard-1", 1490)] == list(range(3490, 4000))
    assert [row["number"] for row in stream.open("shard-1", 3)] == list(range(2003, 4000))
    with pytest.raises(ValueError, match="`start=2001`: the shard has 2000 rows only"):
        stream.open("shard-1", 2001)


MADE: dict[str, tuple[int, Callable[[Any, Any, Any], Any]]] = {
    "take": (1, lambda datasets, first, second: first.take(10).map(lambda row: row)),
    "skip": (1, lambda datasets, first, second: first.skip(7).take(30)),
    "interleaved": (1, lambda datasets, first, second: datasets.interleave_datasets([first, second])),
    "by chance": (1, lambda datasets, first, second: datasets.interleave_datasets([first, second], [0.3, 0.7], seed=1)),
    "with indices": (1, lambda datasets, first, second: first.filter(lambda row, at: at < 20, with_indices=True)),
    "joined": (10, lambda datasets, first, second: datasets.concatenate_datasets([first, second])),
    "joined parts": (1, lambda datasets, first, second: datasets.concatenate_datasets([first.take(3), second])),
    "mapped": (5, lambda datasets, first, second: first.map(lambda row: row).filter(lambda row: row["number"] % 2)),
}


@pytest.mark.parametrize("form", MADE)
def test_rows_are_those_of_the_dataset_also_where_it_counts_over_its_shards(form: str) -> None:
    datasets: Any = pytest.importorskip("datasets")
    sources = [
        datasets.Dataset.from_dict({"number": list(range(first, first + 60))}).to_iterable_dataset(num_shards=5)
        for first in (0, 100)
    ]
    num_shards, make = MADE[form]
    stream = HuggingFaceStream(make(datasets, *sources))
    expected = [row["number"] for row in make(datasets, *sources)]
    assert [row["number"] for shard in stream.shards() for row in stream.open(shard.name, 0)] == expected
    assert len(stream.shards()) == num_shards
    if num_shards == 1:
        assert [row["number"] for row in stream.open("shard-0", 2)] == expected[2:]


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a `list`: need a `datasets\.IterableDataset`"):
        HuggingFaceStream([1])


VALUES: dict[str, Any] = {
    "number": list(range(90)),
    "some missing": [None if number % 50 == 7 else number for number in range(90)],
    "text": [f"row {number}" for number in range(90)],
    "list": [[number] * (number % 4) for number in range(90)],
    "list with a hole": [[number, None if number == 40 else 1] for number in range(90)],
    "dict": [{"a": number, "b": [number]} for number in range(90)],
}


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
@pytest.mark.parametrize("name", VALUES)
def test_rows_of_tables_are_what_the_dataset_yields_one_by_one(name: str, form: str | None) -> None:
    datasets: Any = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({name: VALUES[name]}).to_iterable_dataset().with_format(form)
    rows = list(HuggingFaceStream(dataset).open("shard-0", 5))
    assert [(type(row), repr(row)) for row in rows] == [(type(row), repr(row)) for row in dataset][5:]
