"""A loop that stands still where its batches break off, and goes on with others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from raysgd.worker.data.kept_loop import KeptLoop, LoopEnded
from tests.worker.data.test_batch_streams import Place


class Broken(Exception):
    """What the loop is to stand still for."""


def batches(*given: Any) -> Iterator[Any]:
    for each in given:
        if isinstance(each, Exception):
            raise each
        yield each


def kept(*given: Any) -> KeptLoop:
    return KeptLoop(batches(*given), Place(), lambda error: isinstance(error, Broken))


def test_it_goes_on_with_the_batches_that_follow() -> None:
    loop, seen = kept(1, Broken()), []

    def body() -> str:
        seen.extend(loop)
        return "done"

    for _ in range(2):
        with pytest.raises(Broken):
            loop.run(body)
        assert not loop.is_over
        loop.follow(batches(2, Broken()))
    loop.follow(batches(3))
    assert loop.run(body) == "done"
    assert loop.is_over
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("raises", ["the loader", "the loop"])
def test_an_exception_of_user_code_goes_through_it(raises: str) -> None:
    loop = kept(1, ValueError("the loader"))

    def body() -> None:
        for _ in loop:
            if raises == "the loop":
                raise ValueError("the loop")

    with pytest.raises(ValueError, match=raises):
        loop.run(body)
    assert loop.is_over


def test_one_that_is_not_needed_any_more_is_ended_behind_its_clean_up() -> None:
    loop, seen = kept(Broken()), []

    def body() -> None:
        try:
            next(loop)
        except Exception:
            seen.append("caught")
        finally:
            seen.append("cleaned up")

    with pytest.raises(Broken):
        loop.run(body)
    loop.end()
    assert loop.is_over
    assert seen == ["cleaned up"]


def test_one_that_never_stood_still_is_ended_at_its_next_batch() -> None:
    loop = kept(1)
    loop.end()
    with pytest.raises(LoopEnded):
        loop.run(partial(next, loop))
