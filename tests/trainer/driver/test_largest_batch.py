"""The number of samples that a worker processes at once, as the driver keeps it."""

from __future__ import annotations

from raysgd.trainer.driver.life import LargestBatch


def test_the_smallest_size_that_a_worker_reports_holds_for_all() -> None:
    largest = LargestBatch()
    assert largest.for_group("ab") is None
    largest.split({"a": 8, "b": 4})
    assert [largest.for_group("ab"), largest.for_group("ab")] == [4, 4]


def test_a_larger_size_is_tried_only_when_all_that_ran_out_of_memory_have_left() -> None:
    largest = LargestBatch()
    largest.split({"x": 4})
    assert [largest.for_group(group) for group in ("xyz", "xyz", "xy", "xyw", "yw", "yw", "ywv")] == [
        4, 4, 4, 4, 8, 8, 16,
    ]  # fmt: skip


def test_workers_that_replace_all_others_begin_with_the_size_that_was_found() -> None:
    largest = LargestBatch()
    assert largest.for_group("ab") is None
    largest.split({"a": 4})
    assert [largest.for_group("cd"), largest.for_group("cd"), largest.for_group("ce")] == [4, 4, 8]


def test_a_size_that_workers_have_loaded_is_kept() -> None:
    largest = LargestBatch()
    largest.size = 6
    assert largest.for_group("ab") == 6
