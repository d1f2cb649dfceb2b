from __future__ import annotations

from typing import Any

import pytest

from raysgd.train._worker.pending_checkpoints import PendingCheckpoints


def fail(told: Any) -> Any:
    raise TypeError("cannot be copied")


def test_a_copy_is_fetched_once() -> None:
    pending = PendingCheckpoints()
    first, second = pending.keep("a"), pending.keep("b")
    assert [pending.fetch(second), pending.fetch(first)] == ["b", "a"]
    with pytest.raises(KeyError):
        pending.fetch(first)


def test_what_is_dropped_holds_nobody_up() -> None:
    pending = PendingCheckpoints()
    kept, announced = pending.keep("a"), pending.announce()
    pending.clear()
    pending.settle(announced, fail)
    for token in (kept, announced):
        with pytest.raises(KeyError):
            pending.fetch(token)
