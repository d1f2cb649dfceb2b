"""Streams and what is done with their rows: arguments that are refused, lengths, reading by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from raysgd.exceptions import InvalidCountError
from raysgd.streams.stream import RowStep, RowSteps, Shard, Stream, check_shards
from tests.streams.made import MadeStream

STREAM = MadeStream([3, 4])


def test_a_shard_is_read_by_hand_through_all_steps() -> None:
    stream = STREAM.map(lambda row: row[1]).filter(lambda number: number != 1).map(lambda number: -number)
    assert list(stream.open("shard-1", 0)) == [0, -2, -3]
    assert list(stream.open("shard-1", 3)) == [-3]
    assert list(STREAM.open("shard-0", 3)) == []


def test_nothing_is_changed_in_place() -> None:
    assert STREAM.map(str) is not STREAM
    mapped = STREAM.map(str)
    mapped.filter(bool)
    assert len(mapped.steps) == 1


def test_lengths_are_known_where_all_shards_say_theirs() -> None:
    assert len(STREAM) == len(STREAM.map(str)) == len(STREAM.shuffle(10)) == 7
    assert len(STREAM.take(5)) == len(STREAM.take(5).take(9)) == 5
    assert (len(STREAM.batch(2)), len(STREAM.batch(2, drop_last=True)), len(STREAM.take(4).batch(2))) == (4, 3, 2)
    for unknown in (MadeStream([3], is_known=False), STREAM.filter(bool), MadeStream([3], is_known=False).take(2)):
        assert bool(unknown)
        with pytest.raises(TypeError, match="has no length"):
            len(unknown)


def test_steps_keep_to_the_order_in_which_they_make_sense() -> None:
    for call, words in (
        (lambda: STREAM.batch(2).map(str), "`map` after `batch`"),
        (lambda: STREAM.batch(2).filter(bool), "`filter` after `batch`"),
        (lambda: STREAM.batch(2).shuffle(9), "`shuffle` after `batch`"),
        (lambda: STREAM.batch(2).take(9), "`take` after `batch`"),
        (lambda: STREAM.batch(2).batch(3), "`batch` after `batch`"),
        (lambda: STREAM.take(2).filter(bool), "`filter` after `take`"),
        (lambda: STREAM.take(2).shuffle(9), "`shuffle` after"),
        (lambda: STREAM.shuffle(9).shuffle(9), "`shuffle` after"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_counts_are_checked(value: Any) -> None:
    for name, call in (("buffer", STREAM.shuffle), ("num_rows", STREAM.take), ("size", STREAM.batch)):
        with pytest.raises(InvalidCountError, match=re.escape(f"`{name}={value!r}`: need an integer of at least 1")):
            call(value)


def test_functions_and_switches_are_checked() -> None:
    for call in (lambda: STREAM.map(3), lambda: STREAM.filter(None), lambda: STREAM.batch(2, collate="x")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="need a function of a"):
            call()
    with pytest.raises(ValueError, match="`seed=-1`"):
        STREAM.shuffle(9, seed=-1)
    with pytest.raises(ValueError, match="`seeded='no'`"):
        STREAM.map(str, seeded="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shards", "error", "words"),
    [
        ([], ValueError, "has no shards"),
        ([Shard("a"), Shard("b"), Shard("a")], ValueError, "two shards have the name 'a'"),
        ([Shard("a", -1)], ValueError, "`num_rows=-1`"),
        (["a"], TypeError, "need a `Shard`"),
    ],
)
def test_shards_are_checked(shards: list[Any], error: type[Exception], words: str) -> None:
    class Given(Stream):
        def shards(self) -> list[Shard]:
            return shards

        def open(self, shard: str, start: int) -> Any:
            raise AssertionError("not opened")

    with pytest.raises(error, match=words):
        check_shards(Given())


def test_the_number_of_a_step_does_not_depend_on_how_steps_are_cut() -> None:
    step = RowStep(lambda row, rng: (row, int(rng.integers(10**9))), is_filter=False, is_seeded=True)
    whole = RowSteps([step, step], "0/0")
    first, second = RowSteps([step], "0/0"), RowSteps([step], "0/0", first=1)
    origin = ("shard", 3)
    assert whole("row", *origin) == second(first("row", *origin), *origin)
