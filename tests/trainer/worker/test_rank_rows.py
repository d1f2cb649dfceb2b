"""What ranks tell each other in each step; the ranks are threads with real connections.

Covers `raysgd.trainer.worker.rank_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.connections.group import Group
from raysgd.core.engine.shared.types import World
from raysgd.trainer.worker.rank_rows import RankRows, RowExchange
from tests.core.connections.ranks import groups_of
from tests.core.connections.test_group import on_all


@pytest.fixture(params=[1, 2, 3, 9])
def groups(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    """The groups of some ranks; nine are more than all talk to each other."""
    if request.param == 1:
        yield [Group(World(0, 1))]
        return
    with groups_of(request.param) as groups:
        yield groups


def told(groups: list[Group], steps: list[Any]) -> list[list[dict[str, Any]]]:
    """What each rank has heard in each step; `steps` says what a rank tells in each of them."""

    def take_steps(group: Group) -> list[dict[str, Any]]:
        call: Any = SimpleNamespace(rows=RankRows(f"name of {group.rank}"))
        exchange, found = RowExchange(call, group.gather), []
        for number, step in enumerate(steps, start=1):
            call.meters, call.num_batches_completed = SimpleNamespace(tally=partial(step, group.rank)), number
            exchange.take_rows(group.gather(exchange.row_to_send()))
            rows = call.rows.as_of(number + 1)
            found.append({name: (row.layout, row.numbers.tolist()) for name, row in rows.items()})
        return found

    return on_all(groups, take_steps)


def test_every_rank_hears_what_each_rank_tells_in_each_step(groups: list[Group]) -> None:
    def step(number: int) -> Any:
        return lambda rank: (("loss", "lanes"), [number + 0.1 * rank, 1.0, 2.0 * rank, 3e300])

    ranks = range(len(groups))
    for heard in told(groups, [step(0), step(1)]):
        for number, rows in enumerate(heard):
            assert rows == {f"name of {rank}": step(number)(rank) for rank in ranks}


def test_ranks_may_tell_different_things_and_others_than_before(groups: list[Group]) -> None:
    last = len(groups) - 1

    def first(rank: int) -> Any:
        return (), []

    def second(rank: int) -> Any:
        return tuple(f"metric {number}" for number in range(rank)), [float(rank)] * rank

    def third(rank: int) -> Any:  # more than fits
        return ("many", [float(number) for number in range(3000)]) if rank == last else (None, [])

    for heard in told(groups, [first, second, third, second, first]):
        for number, step in ((1, second), (2, third), (3, second), (4, first)):
            assert heard[number] == {f"name of {rank}": step(rank) for rank in range(len(groups))}
        assert heard[4] == heard[0]


def rows_after(*steps: int) -> RankRows:
    """What rank "a" knows that took part in the exchanges which follow so many completed steps."""
    rows = RankRows("a")
    for number in steps:
        rows.note(number, {name: f"{name} in {number}" for name in "abc"})
    return rows


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (4, "a in 3"),  # the last step is complete
        (3, "a in 2"),  # it broke off after the exchange
        (9, "a in 3"),
    ],
)
def test_what_counts_is_what_was_told_in_the_last_step_that_counts(num_steps: int, expected: str) -> None:
    assert rows_after(0, 1, 2, 3).as_of(num_steps)["a"] == expected


def test_of_a_step_that_was_repeated_the_last_exchange_counts() -> None:
    rows = rows_after(0, 1)
    rows.note(1, {"a": "again"})
    assert rows.as_of(2) == {"a": "again"}
    assert rows.as_of(1)["a"] == "a in 0"


def test_nothing_is_known_before_the_first_step() -> None:
    assert RankRows("a").as_of(0) == {}
    assert rows_after(0).as_of(0) == {}


def test_ranks_that_are_not_in_the_next_group_are_lost_as_of_their_last_step_that_counts() -> None:
    rows = rows_after(0, 1, 2)
    rows.keep_lost(2, rows.as_of(2), {"a", "c", "new"})
    assert rows.lost == {"b": "b in 1"}


def test_a_rank_that_is_lost_before_the_next_step_is_known_from_the_same_exchange() -> None:
    rows = rows_after(0, 1)
    rows.keep_lost(2, rows.as_of(2), {"a", "c"})
    rows.keep_lost(2, rows.as_of(2), {"a"})  # c was lost while the group formed
    assert rows.lost == {"b": "b in 1", "c": "c in 1"}


def test_a_rank_that_was_lost_stays_so_while_others_tell_more() -> None:
    rows = rows_after(0)
    rows.keep_lost(1, rows.as_of(1), {"a", "c"})
    rows.note(1, {"a": "a later", "c": "c later"})
    rows.keep_lost(2, rows.as_of(2), {"a", "c"})
    assert rows.lost == {"b": "b in 0"}
    assert rows.as_of(2) == {"a": "a later", "c": "c later"}


def test_a_group_that_forms_before_the_first_step_has_lost_nothing() -> None:
    rows = RankRows("a")
    rows.keep_lost(0, rows.as_of(0), {"a"})
    assert rows.lost == {}
