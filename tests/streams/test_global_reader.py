"""The global batches of a stream: one order for all numbers of workers, from any position, each row once.

Covers `raysgd.streams.global_reader`, `raysgd.streams.lanes` and `raysgd.streams.loaders`: a reader is where they
are used.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raysgd.exceptions import StreamError
from raysgd.streams.lanes import StreamPosition
from raysgd.streams.stream import Stream
from tests.streams.made import START, MadeStream, counts, division, joint, pass_of, read_together, reader
from tests.streams.test_source import data_of, source_of

Row = tuple[str, int]


def in_thirds(row: Row) -> bool:
    return row[1] % 3 != 0


FORMS: dict[str, Callable[[Stream], Stream]] = {
    "plain": lambda stream: stream,
    "filtered": lambda stream: stream.filter(in_thirds),
    "shuffled": lambda stream: stream.shuffle(300),
    "all": lambda stream: stream.map(lambda row: (*row, -row[1])).filter(in_thirds).shuffle(200, seed=3).take(290),
}


def rows_of(steps: list[Any]) -> list[Any]:
    return [row for step in steps for row in joint(step)]


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_shards", [1, 100])
def test_global_batches_do_not_depend_on_the_number_of_workers(num_shards: int, form: str, is_known: bool) -> None:
    stream = FORMS[form](MadeStream([500 // num_shards] * num_shards, is_known)).batch(24)
    alone = [joint(step) for step in read_together(pass_of(stream), 1)]
    rows = [row for batch in alone for row in batch]
    assert len(set(rows)) == len(rows) == (500 if form in ("plain", "shuffled") else len(rows))
    assert [len(batch) for batch in alone[:-1]] == [24] * (len(alone) - 1)
    for world_size in (2, 3, 7):
        steps = read_together(pass_of(stream), world_size, num_ahead=world_size % 4)
        assert [joint(step) for step in steps] == alone
        assert all(max(counts(step)) - min(counts(step)) <= 1 for step in steps if sum(counts(step)) >= 2 * world_size)


def test_a_filter_leaves_out_what_it_refuses_and_nothing_else() -> None:
    stream = MadeStream([70, 0, 31], is_known=False).filter(in_thirds).batch(10)
    rows = rows_of(read_together(pass_of(stream), 3))
    assert sorted(rows) == [(f"shard-{s}", row) for s, length in ((0, 70), (2, 31)) for row in range(length) if row % 3]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 30))])
def test_a_pass_goes_on_after_any_changes_with_the_next_row(seed: int) -> None:
    """Shards of any length, known or not; workers that come and go at any step."""
    chance = random.Random(seed)
    lengths = [chance.choice([0, 1, 7, 40, 300]) for _ in range(chance.choice([1, 2, 6, 30, 150]))] + [90]
    source = MadeStream(lengths, is_known=chance.random() < 0.5)
    stream = chance.choice(list(FORMS.values()))(source).batch(chance.choice([1, 7, 24, 64, 200]))
    num_lanes = chance.choice([7, 16, 64])
    undisturbed = [joint(step) for step in read_together(pass_of(stream, 2, seed, num_lanes), 1)]
    done: list[Any] = []
    ends: list[bool] = []
    position = START
    while True:
        world_size, num_steps = chance.randint(1, 7), chance.randint(1, 4)
        steps = read_together(
            pass_of(stream, 2, seed, num_lanes),
            world_size,
            position,
            num_steps,
            chance.choice([None, 5]),
            num_ahead=chance.choice([0, 0, 1, 3]),
        )
        if not steps:
            break
        done += [joint(step) for step in steps]
        ends += [batch.ends_pass for step in steps for batch in step[0] if batch.plan.ends_global_batch]
        positions = {batch.after for batches in steps[-1] for batch in batches}
        assert len(positions) == 1  # all ranks know it
        [position] = positions
        assert position.num_rows == sum(map(len, done))
    assert done == undisturbed
    assert ends == [False] * (len(done) - 1) + [True]


def test_a_worker_without_rows_repeats_some_that_do_not_count() -> None:
    [step] = read_together(pass_of(MadeStream([3]).batch(8)), 4)
    assert counts(step) == [3, 0, 0, 0]
    assert all(batch.batch for [batch] in step)
    first, last = read_together(pass_of(MadeStream([11]).batch(8)), 4)
    assert [batch.batch for [batch] in last][1:] == [batch.batch for [batch] in first][1:]
    unpadded = reader(pass_of(MadeStream([3]).batch(8)), division(8, 4), 2, pad=False)
    assert [batches for _, batches in unpadded] == [[None]]


def test_passes_differ_where_a_stream_is_shuffled_and_seeds_decide_how() -> None:
    def order(stream: Stream, pass_index: int, seed: int) -> list[Row]:
        return rows_of(read_together(pass_of(stream, pass_index, seed), 2))

    source = MadeStream([40] * 6)
    plain, shuffled = source.batch(16), source.shuffle(200).batch(16)
    assert order(plain, 0, 0) == order(plain, 1, 1)
    assert order(shuffled, 0, 0) == order(shuffled, 0, 0)
    orders = [order(shuffled, *numbers) for numbers in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(each) for each in orders}) == 3
    assert all(sorted(each) == sorted(order(plain, 0, 0)) for each in orders)
    own = source.shuffle(200, seed=5).batch(16)
    assert order(own, 0, 0) == order(own, 0, 1) != order(shuffled, 0, 0)


@pytest.mark.parametrize(("lengths", "buffer"), [([640], 640), ([640], 128), ([160] * 4, 640)])
def test_a_shuffle_mixes_as_many_rows_as_it_says(lengths: list[int], buffer: int) -> None:
    """Over 20 passes, row 0 meets as many others in its batch of 8 as it would by chance, and so do first batches."""
    shuffled = MadeStream(lengths).shuffle(buffer).batch(8)
    passes = [[joint(step) for step in read_together(pass_of(shuffled, index), 1)] for index in range(20)]
    met = {row for batches in passes for batch in batches if ("shard-0", 0) in batch for row in batch}
    begun = {row for batches in passes for row in batches[0]}
    by_chance = [buffer * (1 - (1 - 1 / buffer) ** (20 * num)) for num in (7, 8)]
    assert len(met) - 1 > 0.9 * by_chance[0]
    assert len(begun) > 0.9 * by_chance[1]


def test_random_numbers_belong_to_the_row_however_it_is_read() -> None:
    stream = MadeStream([60, 9]).map(lambda row, rng: (*row, int(rng.integers(10**9))), seeded=True)
    drawn = [
        {tuple(row[:2]): row[2] for row in rows_of(read_together(pass_of(form.batch(size), *numbers), world_size))}
        for form, size, numbers, world_size in (
            (stream, 8, (0, 0), 1),
            (stream, 20, (0, 0), 3),
            (stream.shuffle(100), 8, (0, 0), 2),
            (stream, 8, (1, 0), 1),
            (stream, 8, (0, 1), 1),
        )
    ]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(set(drawn[0].values())) == 69
    assert not set(drawn[0].values()) & (set(drawn[3].values()) | set(drawn[4].values()))


def test_a_last_global_batch_that_is_not_full_can_be_left_out() -> None:
    stream = MadeStream([10, 10, 1])
    assert [sum(counts(step)) for step in read_together(pass_of(stream.batch(8)), 2)] == [8, 8, 5]
    assert [sum(counts(step)) for step in read_together(pass_of(stream.batch(8, drop_last=True)), 2)] == [8, 8]
    assert [sum(counts(step)) for step in read_together(pass_of(stream.take(16).batch(8)), 2)] == [8, 8]


def test_an_endless_stream_is_read_as_far_as_needed() -> None:
    source = MadeStream([10**9] * 3, is_known=False)
    steps = read_together(pass_of(source.shuffle(100).batch(32)), 3, num_steps=20)
    assert len(set(rows_of(steps))) == 640
    assert sum(source.num_read.values()) < 12_000  # three workers look at the shards that they share


@pytest.mark.parametrize("form", ["plain", "shuffled"])
def test_the_middle_is_reached_without_reading_what_came_before(form: str) -> None:
    source = MadeStream([100_000] * 10_000)
    of_pass = pass_of(FORMS[form](source).batch(512))
    position = StreamPosition(512 * 1_234_567)
    [step] = read_together(of_pass, 2, position, num_steps=1)
    assert len(set(joint(step))) == 512
    assert max(row for _, row in joint(step)) > 1000
    assert sum(source.opened.values()) <= 70
    assert sum(source.num_read.values()) < 3000


def test_where_nothing_is_known_positions_lead_there_as_well() -> None:
    source = MadeStream([4000] * 200, is_known=False)
    stream = source.filter(in_thirds).shuffle(640).batch(512)
    steps = read_together(pass_of(stream), 3, num_steps=300)
    source.num_read.clear()
    again = read_together(pass_of(stream), 2, steps[298][0][0].after, num_steps=1)
    assert joint(again[0]) == joint(steps[299])
    assert sum(source.num_read.values()) < 10_000  # of 230,000


def test_one_reading_of_a_shard_is_enough_for_all_lanes_of_a_worker() -> None:
    source = MadeStream([2000, 2000])
    read_together(pass_of(source.shuffle(500).batch(40)), 1)
    assert source.num_read == {"shard-0": 2000, "shard-1": 2000}


def test_a_filter_that_starves_some_lanes_costs_more_reading_but_no_row() -> None:
    source = MadeStream([64 * 900])
    stream = source.filter(lambda row: row[1] % 64 != 5 or row[1] >= 64 * 890).batch(63)
    steps = read_together(pass_of(stream), 1)
    assert len(set(rows_of(steps))) == 63 * 900 + 10
    assert sum(source.num_read.values()) < 4 * 64 * 900


@pytest.mark.parametrize("said", [30, 39, 41, 60])
def test_a_shard_that_is_not_as_long_as_it_said_is_named(said: int) -> None:
    class Changed(MadeStream):
        def shards(self) -> list[Any]:
            return [shard._replace(num_rows=said) for shard in super().shards()]

    with pytest.raises(StreamError, match=f"'shard-0' has 40 rows instead of the {said}"):
        read_together(pass_of(Changed([40]).batch(8)), 2)


def test_errors_name_shard_and_row() -> None:
    def refuse(row: Row) -> Row:
        if row == ("shard-1", 7):
            raise KeyError("no label")
        return row

    class Broken(MadeStream):
        def open(self, shard: str, start: int) -> Any:
            for row in super().open(shard, start):
                if row == ("shard-0", 9):
                    raise OSError("disk on fire")
                yield row

    with pytest.raises(StreamError, match=r"shard 'shard-1', row 7: `refuse` failed with KeyError: 'no label'"):
        read_together(pass_of(MadeStream([20, 20]).map(refuse).batch(8)), 1)
    with pytest.raises(StreamError, match=r"shard 'shard-0' cannot be read from row 9 on: OSError: disk on fire"):
        read_together(pass_of(Broken([20, 20]).batch(8)), 1)


def as_row(row: Row) -> Any:
    odd = row == ("shard-1", 7)
    return {"number": row[1], "point": np.zeros(3 if odd else 2), "name": None if row[1] == 9 else "x"}


@pytest.mark.parametrize(("num_workers", "place"), [(0, "shard 'shard-1', row 7"), (2, r"row \d+ of the batch")])
def test_rows_that_make_no_batch_are_named_with_the_field_in_which_they_differ(num_workers: int, place: str) -> None:
    def stacked(rows: list[Any]) -> Any:
        return np.stack([row["point"] for row in rows])

    stream = MadeStream([20, 20]).map(as_row).batch(16, collate=stacked, num_workers=num_workers)
    where = (
        rf"\({place}: `row\['point'\]` is a `ndarray` of shape \(3,\) and type float64, and a `ndarray` of shape \(2,\)"
    )
    with pytest.raises(StreamError, match=rf"rows cannot be collated .* {where} .*ValueError: all input arrays"):
        list(source_of(data_of(stream)).open(0, 0))
    broken = MadeStream([4]).batch(4, collate=lambda rows: rows[9])
    with pytest.raises(StreamError, match=r"\(shard 'shard-0', row 0, to shard 'shard-0', row 3\): IndexError"):
        list(source_of(data_of(broken)).open(0, 0))


def test_a_batch_of_a_worker_has_a_limit_as_for_loaders() -> None:
    steps = read_together(pass_of(MadeStream([50]).batch(24)), 2, cap=5)
    assert [[batch.plan.num_samples for batch in batches] for batches in steps[0]] == [[4, 4, 4], [4, 4, 4]]
    places = [(batch.plan.starts_global_batch, batch.plan.ends_global_batch) for batch in steps[0][0]]
    assert places == [(True, False), (False, False), (False, True)]
    assert len(set(rows_of(steps))) == 50


class Damaged(MadeStream):
    """Single rows of it cannot be read, and all from one on of its third shard."""

    def open(self, shard: str, start: int) -> Any:
        for row in super().open(shard, start):
            if row in [("shard-0", 0), ("shard-1", 4), ("shard-1", 19)] or (row[0] == "shard-2" and row[1] >= 10):
                raise OSError("disk on fire")
            yield row


def refuse_nine(row: Row) -> Row:
    if row == ("shard-0", 9):
        raise KeyError("no label")
    return row


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("num_shards", [5, 100])
@pytest.mark.parametrize("buffer", [1, 300])
def test_what_cannot_be_read_is_left_out_and_counted_by_all(num_shards: int, is_known: bool, buffer: int) -> None:
    source = Damaged([20] * num_shards, is_known).map(refuse_nine).shuffle(buffer)
    stream = source.batch(24, on_error="skip")
    alone = read_together(pass_of(stream), 1)
    rows = {(f"shard-{shard}", row) for shard in range(num_shards) for row in range(20)}
    bad = {
        ("shard-0", 0),
        ("shard-0", 9),
        ("shard-1", 4),
        ("shard-1", 19),
        *(("shard-2", row) for row in range(10, 20)),
    }
    assert sorted(rows_of(alone)) == sorted(rows - bad)
    for world_size in (2, 3):
        assert [joint(step) for step in read_together(pass_of(stream), world_size, num_ahead=2)] == [*map(joint, alone)]
    middle = alone[2][0][-1].after
    rest = read_together(pass_of(stream), 2, middle)
    assert [joint(step) for step in rest] == [joint(step) for step in alone[3:]]
    counted = {batch.after.left_out for rank in rest[-1] for batch in rank}
    # Behind the fourth bad row in a row the rest is not looked at, and counted only where its length is known.
    assert counted == {len(bad) if is_known else 8} == {alone[-1][0][-1].after.left_out}


class RaisesAtItsEnd(MadeStream):
    """Raises an error after the last row of each shard."""

    def open(self, shard: str, start: int) -> Any:
        yield from super().open(shard, start)
        raise OSError("disk on fire")


def test_an_error_after_the_last_row_takes_no_row_with_it() -> None:
    stream = RaisesAtItsEnd([20] * 5).batch(24, on_error="skip")
    [last] = read_together(pass_of(stream), 1)[-1]
    assert len(rows_of(read_together(pass_of(stream), 1))) == 100
    assert last[-1].after.left_out == 0
    with pytest.raises(StreamError, match="disk on fire"):
        read_together(pass_of(RaisesAtItsEnd([20] * 5).batch(24)), 1)


def test_left_out_rows_are_named_but_not_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    stream = MadeStream([40] * 3).filter(lambda row: 1 // (row[1] % 2)).batch(8, on_error="skip")
    assert len(rows_of(read_together(pass_of(stream), 1))) == 60
    assert len([each for each in caplog.messages if "skipped in a stream" in each]) <= 10


def test_what_to_do_on_errors_is_checked() -> None:
    with pytest.raises(ValueError, match='`on_error=\'ignore\'`: allowed are "raise" and "skip"'):
        MadeStream([3]).batch(2, on_error="ignore")
