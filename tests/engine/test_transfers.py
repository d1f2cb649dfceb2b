from __future__ import annotations

import pickle
from typing import Any

import pytest

from raysgd.engine.local_worker import LocalCall
from raysgd.engine.transfers import FetchedParts, Parts, transfer


class Slow:
    """A transfer that is not there yet."""

    reference = "reference"

    def __init__(self) -> None:
        self.value: Any = None
        self.waits: list[float | None] = []

    def result(self, timeout_s: float | None) -> Any:
        self.waits.append(timeout_s)
        if self.value is None:
            raise TimeoutError("still on its way")
        return self.value


def in_driver(value: Any) -> Any:
    return transfer(LocalCall(lambda: value))


def test_parts_are_there_when_all_are() -> None:
    slow = Slow()
    fetched = FetchedParts([in_driver("a"), slow])
    with pytest.raises(TimeoutError):
        fetched.result(0.0)
    slow.value = "b"
    parts = fetched.result(None)
    assert slow.waits == [0.0, None]
    assert (len(parts), parts[0], parts[1]) == (2, "a", "b")
    assert parts.references == (None, "reference")


def test_parts_that_wait_together_wait_no_longer_than_one() -> None:
    second = Slow()
    first = Slow()
    first.value = "a"
    with pytest.raises(TimeoutError):
        FetchedParts([first, second]).result(5.0)
    [waited] = second.waits
    assert waited is not None
    assert 0.0 <= waited <= 5.0


def test_parts_travel_as_references_but_for_those_that_have_none() -> None:
    parts = Parts(("in the driver", "large"), (None, "reference"))
    arrived = pickle.loads(pickle.dumps(parts))
    assert (arrived.values, arrived.references) == (("in the driver", None), (None, "reference"))
    assert (parts[1], arrived[0]) == ("large", "in the driver")
