"""Passes over a stream for one worker, and the positions that a state carries.

Covers `raysgd.streams.source`: a source is where it is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from raysgd.core.arrays.division import Division, ShardedGlobalBatch
from raysgd.streams.global_reader import StartSum
from raysgd.streams.source import StreamData, StreamSource, stream_data
from raysgd.streams.stream import Stream
from tests.streams.made import MadeStream


@dataclass(frozen=True)
class Place:
    """One of some workers that tell each other nothing."""

    rank: int = 0
    world_size: int = 1

    def adding(self) -> StartSum:
        raise AssertionError("not called")


class Tuples:
    """Makes a tuple of rows."""

    def __call__(self, rows: list[Any]) -> Any:
        return tuple(rows)

    def join(self, batches: list[Any]) -> Any:
        return sum(batches, ())

    def begin_process(self) -> None:
        """Nothing."""


def data_of(stream: Stream, name: str = "train", world_size: int = 1) -> StreamData:
    return stream_data(stream, name, Division, world_size)


def source_of(data: StreamData, seed: int = 0, rank: int = 0, world_size: int = 1) -> StreamSource:
    return StreamSource(data, Place(rank, world_size), seed, Tuples())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_saved_position_leads_to_the_next_row_in_another_process(is_known: bool) -> None:
    stream = MadeStream([30] * 4, is_known).shuffle(50).batch(16)
    source = source_of(data_of(stream), seed=7)
    items = list(source.open(1, 0))
    assert [item.plan.num_samples for item in items] == [16] * 7 + [8]
    assert source.num_steps() == 8
    for num_steps in (0, 3, 8):
        consumed = items[num_steps - 1].used_after if num_steps else 0
        assert consumed == min(120, 16 * num_steps)
        state = {
            "consumed": consumed,
            "is_mid_pass": True,
            **json.loads(json.dumps(source.state(consumed, True))),
        }  # plain data
        other = source_of(data_of(stream))
        assert other.load_state(state)
        assert list(other.open(1, consumed)) == items[num_steps:]


def test_steps_of_a_pass_are_counted_as_soon_as_they_are_known() -> None:
    known, unknown = (source_of(data_of(MadeStream([20, 13], each).batch(8))) for each in (True, False))
    assert (known.num_steps(), unknown.num_steps()) == (5, None)
    items = known.open(0, 16), unknown.open(0, 0)
    assert known.num_steps() == 3
    assert sum(1 for _ in items[0]) == 3
    for number, item in enumerate(items[1], 1):
        assert unknown.num_steps() == (5 if number == 5 else None)
        assert item.used_after == min(33, 8 * number)
    exact = source_of(data_of(MadeStream([20, 12], is_known=False).batch(8)))
    opened = exact.open(0, 0)
    # Known as soon as the last one is.
    assert [exact.num_steps() for _ in zip(range(4), opened, strict=False)] == [None, None, None, 4]
    left_out = data_of(MadeStream([20, 13]).batch(8, drop_last=True))
    assert (left_out.num_rows, source_of(left_out).num_steps()) == (32, 4)


def test_weights_average_to_one_over_the_ranks() -> None:
    stream = MadeStream([21]).batch(8)
    steps = zip(
        *(source_of(data_of(stream, world_size=3), rank=rank, world_size=3).open(0, 0) for rank in range(3)),
        strict=True,
    )
    for ranks in steps:
        assert sum(item.plan.weight for item in ranks) == pytest.approx(3)
        assert [item.plan.weight for item in ranks] == [
            pytest.approx(3 * item.plan.num_samples / item.plan.total_samples) for item in ranks
        ]


def test_logical_shards_and_their_seeds_do_not_depend_on_the_number_of_workers() -> None:
    def shards(world_size: int) -> list[Any]:
        stream = MadeStream([40]).batch(16)
        data = stream_data(stream, "train", partial(ShardedGlobalBatch, num_shards=4), world_size)
        sources = [source_of(data, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sources[0].num_shards == 4
        found = [item for each in sources for item in each.open(0, 0) if item.plan.num_samples]
        return sorted((item.batch, item.plan.seeds) for item in found)

    assert shards(1) == shards(2) == shards(3)


@pytest.mark.parametrize("is_known", [True, False])
def test_an_evaluation_takes_each_row_once(is_known: bool) -> None:
    stream = MadeStream([25, 3], is_known).batch(8)
    items = [
        item
        for rank in range(3)
        for item in source_of(data_of(stream, "validation", 3), rank=rank, world_size=3).open(0, 0)
        if item.plan.num_samples
    ]
    assert sorted(row for item in items for row in item.batch) == sorted(
        (f"shard-{shard}", row) for shard, length in ((0, 25), (1, 3)) for row in range(length)
    )


def test_what_cannot_be_read_by_many_is_refused() -> None:
    for stream in (MadeStream([3]), MadeStream([3]).map(str)):
        with pytest.raises(ValueError, match=r"the train stream has no batch size: end it with `\.batch\(size\)`"):
            data_of(stream)
    with pytest.raises(ValueError, match="65 workers for a stream, which has 64 lanes"):
        data_of(MadeStream([3]).batch(2), world_size=65)
    with pytest.raises(ValueError, match="the validation stream has a `take` and no known length"):
        data_of(MadeStream([3], is_known=False).take(2).batch(2), "validation")


def test_a_position_in_another_stream_is_refused_with_what_differs_and_a_way_out() -> None:
    stream = MadeStream([10, 20])
    source = source_of(data_of(stream.shuffle(80).batch(4)))
    state = json.loads(json.dumps({"consumed": 8, "is_mid_pass": True, **source.state(8, True)}))
    way_out = r".* load the state without its position, with `load\(path, parts="
    for other, words in (
        (MadeStream([10, 21]).shuffle(80), r"other data \(digest of names, lengths and versions of shards '"),
        (MadeStream([10, 20, 1]).shuffle(80), r"number of shards 2, now 3; digest"),
        (stream.shuffle(90), r"buffer and seed of `shuffle` \[80, None\], now \[90, None\]"),
        (stream.shuffle(80, seed=3), r"\[80, None\], now \[80, 3\]"),
        (stream.shuffle(80).filter(bool), "number of filters 0, now 1"),
    ):
        target = source_of(data_of(other.batch(4)))
        with pytest.raises(ValueError, match=words + way_out):
            target.load_state(state)
        assert target.load_state({**state, "seed": 5, "is_mid_pass": False}), "between two epochs it has no place"
        assert target.seed == 5
    with pytest.raises(ValueError, match="`on_error` 'raise', now 'skip'"):
        source_of(data_of(stream.shuffle(80).batch(4, on_error="skip"))).load_state(state)
    with pytest.raises(ValueError, match="data that is not a stream"):
        source.load_state({"consumed": 8, "is_mid_pass": True, "seed": 0, "num_samples": 30})
    source_of(data_of(stream.shuffle(80).map(str).batch(9))).load_state(
        state
    )  # another size of the global batch is fine


LANE = [0, 3, 1, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"turn": 64},
        {"turn": "0"},
        {"lanes": [LANE] * 63},
        {"lanes": [LANE] * 63 + [[2, 0, 0, 0]]},
        {"lanes": [LANE] * 63 + [[0, -1, 0, 0]]},
        {"lanes": [LANE] * 63 + [[0, 2**62, 0, 0]]},
        {"lanes": [LANE] * 63 + [[0, 0, 0]]},
        {"lanes": [LANE] * 63 + [None]},
        {"lanes": None},
        {"lanes": 64},
        {"consumed": 26},
    ],
)
def test_a_damaged_position_is_refused(change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    source = source_of(data_of(MadeStream([30] * 4, is_known=False).take(25).batch(16)))
    next(iter(source.open(0, 0)))
    state = {"consumed": 16, "is_mid_pass": True, **source.state(16, True)}
    assert source.load_state(state)
    with pytest.raises(ValueError, match="its position in the stream is damaged"):
        source.load_state({**state, **change})
    source.load_state({**state, "lanes": [[1, 0, 0, 0]] * 64})
    assert not list(source.open(0, 16))
    assert "epoch 1 should continue after 16 rows, but no rows are left" in caplog.text
