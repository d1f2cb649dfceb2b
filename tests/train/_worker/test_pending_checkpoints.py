from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raysgd.train._worker.mailbox import PendingCheckpoints


def fail(told: Any) -> Any:
    raise TypeError("cannot be copied")


def test_a_copy_is_fetched_once() -> None:
    pending = PendingCheckpoints()
    first, second = pending.keep("a"), pending.keep("b")
    assert [pending.fetch(second), pending.fetch(first)] == ["b", "a"]
    with pytest.raises(KeyError):
        pending.fetch(first)


def test_an_announced_copy_is_made_when_it_is_fetched() -> None:
    pending = PendingCheckpoints()
    token = pending.announce()
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(pending.fetch, token, 3)
        pending.settle(token, lambda told: f"copy of {told}")
        assert fetched.result() == "copy of 3"


def test_an_announced_copy_that_is_refused_is_not_made() -> None:
    pending = PendingCheckpoints()
    token = pending.announce()
    pending.refuse(token)
    pending.settle(token, fail)
    with pytest.raises(KeyError):
        pending.fetch(token)


def test_a_copy_that_fails_is_an_error_on_both_sides() -> None:
    pending = PendingCheckpoints()
    token = pending.announce()
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(pending.fetch, token)
        with pytest.raises(TypeError, match="cannot be copied"):
            pending.settle(token, fail)
        with pytest.raises(KeyError):
            fetched.result()


def test_what_is_dropped_holds_nobody_up() -> None:
    pending = PendingCheckpoints()
    kept, announced = pending.keep("a"), pending.announce()
    pending.clear()
    pending.settle(announced, fail)
    for token in (kept, announced):
        with pytest.raises(KeyError):
            pending.fetch(token)
