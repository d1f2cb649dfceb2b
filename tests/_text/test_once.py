"""What is done once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from raysgd._text.once import Once


def test_each_key_has_a_first_time_of_its_own() -> None:
    once = Once()
    assert [once.is_first(key) for key in ("a", "a", "b", ("a", 1), "b")] == [True, False, True, True, False]


def test_two_objects_know_nothing_of_each_other() -> None:
    assert Once().is_first("a")
    assert Once().is_first("a")


def test_of_several_threads_one_is_the_first() -> None:
    once = Once()
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: once.is_first("a"), range(1000))) == 1
