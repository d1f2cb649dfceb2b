from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from raysgd.core.engine import transfers
from raysgd.core.engine.transfers import (
    DividedValue,
    LostPartError,
    SharedValue,
    StoredPart,
    ask_all,
    together,
    transfer,
)
from raysgd.core.engine.worker import LocalCall, node_here
from raysgd.exceptions import WorkersLostError


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


class Ranks(list[Slow]):
    """A group whose ranks answer with these transfers."""

    def fetch(self, rank: int, function: Any) -> Slow:
        return self[rank]


@pytest.mark.parametrize(("are_last", "wanted_s"), [(False, 1.0), (True, 10.0)])
def test_reports_are_waited_for_longer_where_no_one_asks_again_and_all_together_no_longer_than_one(
    are_last: bool, wanted_s: float
) -> None:
    late, lost, there = Slow(), Slow(), Slow()
    there.value = "a report"
    lost.result = raising(WorkersLostError("gone"))  # type: ignore[method-assign]
    reports, failure = ask_all(Ranks([late, lost, there]), "function", are_last=are_last)
    assert reports == ["a report"]
    assert isinstance(failure, TimeoutError), "the first one"
    [waited_s] = [each for each in late.waits if each is not None]
    assert waited_s == pytest.approx(wanted_s, abs=0.5)
    assert ask_all(Ranks([there]), "function", are_last=are_last) == (["a report"], None)


def raising(error: Exception) -> Callable[[float | None], Any]:
    def result(timeout_s: float | None) -> Any:
        raise error

    return result


def in_driver(value: Any) -> Any:
    return transfer(LocalCall(lambda: value))


def test_parts_are_there_when_all_are() -> None:
    slow = Slow()
    fetched = together([in_driver("a"), slow], ["home", "a"], {})
    with pytest.raises(TimeoutError):
        fetched.result(0.0)
    slow.value = "b"
    parts = fetched.result(None)
    assert slow.waits == [0.0, None]
    assert (len(parts), parts[0], parts[1]) == (2, "a", "b")
    assert parts.places == ((), (StoredPart("a", "reference"),))


def test_parts_that_wait_together_wait_no_longer_than_one() -> None:
    second = Slow()
    first = Slow()
    first.value = "a"
    with pytest.raises(TimeoutError):
        together([first, second], ["a", "b"], {}).result(5.0)
    [waited] = second.waits
    assert waited is not None
    assert 0.0 <= waited <= 5.0


def test_parts_travel_as_references_but_for_those_that_have_none() -> None:
    places = ((), (StoredPart("a", "reference"),))
    parts = DividedValue(("in the driver", "large"), places)
    arrived = pickle.loads(pickle.dumps(parts))
    assert (arrived.values, arrived.places) == (("in the driver", None), places)
    assert (parts[1], arrived[0]) == ("large", "in the driver")


def test_a_part_is_there_when_its_partner_has_a_copy() -> None:
    sent, arrival = Slow(), Slow()
    sent.value = "never asked for"
    fetched = together([in_driver("a"), sent], ["home", "a"], {1: (arrival, StoredPart("b", "copy"))})
    with pytest.raises(TimeoutError):
        fetched.result(0.0)
    arrival.value = "has arrived"
    parts = fetched.result(None)
    assert (sent.waits, parts.values) == ([], ("a", None))
    assert parts.places == ((), (StoredPart("a", "reference"), StoredPart("b", "copy")))


def test_parts_are_read_from_nodes_that_are_in_use() -> None:
    first, second = StoredPart("a", 1), StoredPart("b", 2)
    parts = DividedValue((None, None, "own"), ((first, second), (second, first), ()))
    assert parts.best_on({"a", "b"}) == parts
    assert parts.best_on({"b"}).places == ((second, first), (second, first), ())
    assert parts.best_on({"c"}) == parts


def test_what_only_the_driver_has_beside_a_lost_node_is_read_from_the_node_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "store", lambda value: SharedValue(f"{value} in the store", f"reference to {value}"))
    home, lost, alive = StoredPart(node_here()[0], "reference to part"), StoredPart("a", 1), StoredPart("b", 2)
    parts = DividedValue(("part", "read", "own", None), ((lost,), (alive,), (), (lost,)))
    best = parts.best_on({"b"})
    assert best.values == ("part in the store", "read", "own", None)
    assert best.places == ((home,), (alive,), (), (lost,))
    assert best.best_on({"c"}).places[0] == (home,)  # it is there already


def test_a_part_is_read_where_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def get(reference: str) -> str:
        if reference.startswith("lost"):
            raise ray.exceptions.ObjectLostError(reference, None, "")
        return f"what {reference} names"

    monkeypatch.setattr(ray, "get", get)
    lost, copy = StoredPart("a", "lost"), StoredPart("b", "copy")
    parts = DividedValue((None, None), ((lost, copy), (lost, StoredPart("b", "lost too"))))
    assert parts[0] == "what copy names"
    with pytest.raises(LostPartError, match="the shard of rank 1"):
        parts[1]
