"""Parallel iterators: what is in which shard, in which order, and when it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import cloudpickle
import pytest

from raysgd.exceptions import InvalidCountError
from raysgd.util.iter import LocalIterator, ParallelIterator, from_items, from_iterators, from_range


def shards_of(iterator: ParallelIterator) -> list[list[Any]]:
    return [list(shard) for shard in iterator.shards()]


class TestWhereElementsComeFrom:
    def test_items_are_dealt_one_after_the_other(self) -> None:
        assert shards_of(from_items(["a", "b", "c"])) == [["a", "c"], ["b"]]
        assert shards_of(from_items([1], num_shards=3)) == [[1], [], []]

    def test_ranges_stay_together(self) -> None:
        assert shards_of(from_range(7, num_shards=3)) == [[0, 1], [2, 3], [4, 5, 6]]

    def test_each_iterable_and_each_function_makes_a_shard(self) -> None:
        assert shards_of(from_iterators([range(2), lambda: iter("ab")])) == [[0, 1], ["a", "b"]]

    @pytest.mark.parametrize(
        "iterator",
        [from_items([1, 2], 1, repeat=True), from_range(3, 1, repeat=True), from_iterators([lambda: [5]], repeat=True)],
        ids=str,
    )
    def test_repeated_shards_have_no_end(self, iterator: ParallelIterator) -> None:
        one_pass = shards_of(iterator.transform(lambda elements: islice(elements, 3)))[0]
        assert iterator.take(6) == (one_pass[: len(set(one_pass))] * 6)[:6]

    def test_an_empty_shard_ends_also_where_it_repeats(self) -> None:
        assert from_items([], 1, repeat=True).take(3) == []

    def test_what_can_be_used_once_says_so_in_the_second_pass(self) -> None:
        elements = iter(from_iterators([iter([1, 2])], repeat=True).get_shard(0))
        assert [next(elements), next(elements)] == [1, 2]
        with pytest.raises(ValueError, match="can be iterated over once"):
            next(elements)


class TestStages:
    def test_functions_of_elements(self) -> None:
        numbers = from_range(6, 2)
        assert shards_of(numbers.for_each(lambda number: 2 * number)) == [[0, 2, 4], [6, 8, 10]]
        assert shards_of(numbers.filter(lambda number: number % 2)) == [[1], [3, 5]]
        assert shards_of(numbers.combine(lambda number: [number] * (number % 3))) == [[1, 2, 2], [4, 5, 5]]

    def test_batches_and_back(self) -> None:
        batches = from_range(5, 1).batch(2)
        assert shards_of(batches) == [[[0, 1], [2, 3], [4]]]
        assert shards_of(batches.flatten()) == [[0, 1, 2, 3, 4]]

    def test_a_whole_shard(self) -> None:
        def sums(numbers: Iterable[int]) -> Iterator[int]:
            total = 0
            for number in numbers:
                total += number
                yield total

        assert shards_of(from_range(6, 2).transform(sums)) == [[0, 1, 3], [3, 7, 12]]

    def test_a_shuffle_draws_from_a_buffer(self) -> None:
        numbers = from_range(20, 1)
        shuffled = numbers.local_shuffle(5, seed=1)
        [first] = shards_of(shuffled)
        assert sorted(first) == list(range(20)) != first
        assert all(number <= place + 5 for place, number in enumerate(first))
        assert shards_of(shuffled) == [first]
        assert shards_of(numbers.local_shuffle(1)) == [list(range(20))]

    @pytest.mark.parametrize("max_concurrency", [0, 1, 3])
    def test_calls_side_by_side_keep_the_order(self, max_concurrency: int) -> None:
        assert shards_of(from_range(9, 1).for_each(str, max_concurrency)) == [list("012345678")]

    def test_calls_run_side_by_side(self) -> None:
        meeting = threading.Barrier(3, timeout=120)

        def meet(number: int) -> int:
            meeting.wait()
            return number

        assert shards_of(from_range(6, 1).for_each(meet, max_concurrency=3)) == [list(range(6))]

    def test_an_error_of_a_call_reaches_who_iterates(self) -> None:
        for max_concurrency in (1, 2):
            with pytest.raises(ZeroDivisionError):
                list(from_range(3, 1).for_each(lambda number: 1 // number, max_concurrency).get_shard(0))

    def test_nothing_runs_before_somebody_iterates(self) -> None:
        seen: list[int] = []
        shard = from_range(4, 1).for_each(seen.append).repartition(1).get_shard(0)
        assert not seen
        next(iter(shard))
        assert seen == [0]


class TestShards:
    def test_new_shards_get_the_elements_in_turn(self) -> None:
        assert shards_of(from_range(6, 2).repartition(3)) == [[0, 3], [1, 4], [2, 5]]
        assert shards_of(from_range(5, 2).repartition(1)) == [[0, 2, 1, 3, 4]]
        assert shards_of(from_items([1, 2, 3], 1, repeat=True).repartition(2).transform(lambda each: islice(each, 4)))[
            0
        ] == [1, 3, 2, 1]

    def test_each_element_is_worked_on_in_one_new_shard_only(self) -> None:
        worked_on: list[int] = []

        def note(number: int) -> int:
            worked_on.append(number)
            return number

        batches = from_range(10, 1).for_each(note).batch(2).for_each(sum).repartition(3)
        assert shards_of(batches) == [[1, 13], [5, 17], [9]]
        assert sorted(worked_on) == list(range(10))

    def test_a_filter_runs_before_elements_are_dealt(self) -> None:
        even = from_range(8, 1).filter(lambda number: number % 2 == 0).for_each(str).repartition(2)
        assert shards_of(even) == [["0", "4"], ["2", "6"]]

    def test_new_shards_divide_one_order_of_a_shuffle_without_a_seed(self) -> None:
        shuffled = from_range(20, 1).local_shuffle(10).for_each(str).repartition(2)
        assert sorted(int(each) for shard in shards_of(shuffled) for each in shard) == list(range(20))

    def test_what_can_be_read_once_is_not_divided(self) -> None:
        numbers = from_iterators([iter([1, 2, 3])])
        with pytest.raises(ValueError, match="`list_iterator`, which can be iterated over once: pass a list"):
            numbers.repartition(2)
        assert shards_of(numbers.repartition(1)) == [[1, 2, 3]]
        assert shards_of(from_iterators([from_range(3, 1).get_shard(0)]).repartition(2)) == [[0, 2], [1]]

    def test_unions_and_selections(self) -> None:
        both = from_range(4, 2).union(from_items("ab", 1))
        assert shards_of(both) == [[0, 1], [2, 3], ["a", "b"]]
        assert shards_of(both.select_shards([2, 0])) == [["a", "b"], [0, 1]]

    def test_all_elements_in_turn(self) -> None:
        numbers = from_range(5, 2)
        assert list(numbers.gather_sync()) == list(numbers.gather_async(batch_ms=5, num_async=2)) == [0, 2, 1, 3, 4]
        assert numbers.take(3) == [0, 2, 1]

    def test_some_are_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        from_range(5, 1).show(2)
        assert capsys.readouterr().out == "0\n1\n"

    def test_a_shard_travels_and_begins_anew(self) -> None:
        shard = from_range(4, 2).for_each(lambda number: number + 1).get_shard(1)
        assert next(shard) == 3
        again: LocalIterator = cloudpickle.loads(cloudpickle.dumps(shard))
        assert list(again) == [3, 4]
        assert [next(shard), next(again)] == [4, 3]

    def test_one_shard_has_the_same_stages(self) -> None:
        shard = from_range(6, 1).get_shard(0)
        assert list(shard.for_each(str).batch(4)) == [list("0123"), list("45")]
        assert sorted(shard.shuffle(3, seed=0)) == list(range(6))
        assert list(shard.filter(lambda number: number > 3).union(shard.batch(3))) == [4, [0, 1, 2], 5, [3, 4, 5]]


class TestBadInput:
    def test_a_parallel_iterator_has_no_order_of_its_own(self) -> None:
        with pytest.raises(TypeError, match=r"gather_sync\(\)"):
            iter(from_range(3))

    @pytest.mark.parametrize("index", [-1, 2])
    def test_shards_that_there_are_not(self, index: int) -> None:
        numbers = from_range(3, 2)
        with pytest.raises(ValueError, match="there are shards 0 to 1"):
            numbers.get_shard(index)
        with pytest.raises(ValueError, match="there are shards 0 to 1"):
            numbers.select_shards([index])

    def test_numbers_that_are_none(self) -> None:
        numbers = from_range(3, 2)
        with pytest.raises(AssertionError, match="`max_concurrency=-1`"):
            numbers.for_each(str, max_concurrency=-1)
        for call in (
            lambda: from_items([1], 0),
            lambda: numbers.repartition(0),
            lambda: numbers.batch(0),
            lambda: numbers.local_shuffle(0),
        ):
            with pytest.raises(InvalidCountError):
                call()
        with pytest.raises(ValueError, match="`shards_to_keep` is empty"):
            numbers.select_shards([])

    def test_names_say_what_was_done(self) -> None:
        numbers = from_range(3, 2, repeat=True).batch(2)
        assert str(numbers) == "ParallelIterator[from_range[3, shards=2, repeat=True].batch(2)]"
        assert repr(numbers.get_shard(1)).startswith("LocalIterator[from_range[3")
