"""How often random seeds find a fault is counted as the page says."""

from __future__ import annotations

import pytest

from tests.simulator.mutations import MUTATIONS
from tests.simulator.rates import (
    FROM_OUTSIDE,
    MOST_SCHEDULES,
    Searches,
    as_table,
    chosen,
    interval,
    is_for_weights,
    search,
    searched,
)


@pytest.mark.parametrize(
    ("num_found", "num", "low", "high"), [(0, 20, 0.0, 0.161), (20, 20, 0.839, 1.0), (10, 20, 0.299, 0.701)]
)
def test_an_interval_is_that_of_wilson(num_found: int, num: int, low: float, high: float) -> None:
    assert interval(num_found, num) == pytest.approx((low, high), abs=0.001)


def test_a_search_counts_schedules_until_one_is_broken() -> None:
    [mutation] = [each for each in MUTATIONS if each.words == "a stopped group stays"]
    assert search(mutation, 0) == 1
    [mutation] = [each for each in MUTATIONS if each.words == "a restart is not paid for"]
    found = search(mutation, 10)
    assert found is not None
    assert search(mutation, 10 + found - 1) == 1
    assert search(mutation, 10, found - 1) is None


def test_a_fault_that_some_search_did_not_find_has_a_row_of_its_own() -> None:
    table = as_table([Searches("easy", [1, 3]), Searches("hard", [None, 40]), Searches("unseen", [None, None])])
    assert table.splitlines()[2:] == [
        "| unseen | 0 of 2 | 0% to 66% |  |",
        "| hard | 1 of 2 | 9% to 91% | 40 |",
        "| 1 others | 2 of 2 | 34% to 100% | 2 |",
        "| all 3 | 3 of 6 | 19% to 81% | 3 |",
    ]
    assert f"found within {MOST_SCHEDULES}" in table


def test_the_weights_were_chosen_by_about_half_of_the_faults() -> None:
    assert 0.4 < sum(map(is_for_weights, MUTATIONS)) / len(MUTATIONS) < 0.6


def test_each_fault_is_in_one_half_and_those_from_outside_are_in_the_table() -> None:
    halves = [{each.words for each in chosen(half)} for half in ("counted", "weights")]
    assert halves[0] | halves[1] == {each.words for each in MUTATIONS}
    assert not halves[0] & halves[1]
    assert {each.words for each in chosen("outside")} == set(FROM_OUTSIDE)


def test_each_search_for_a_fault_has_seeds_of_its_own() -> None:
    [mutation] = [each for each in MUTATIONS if each.words == "a new group is not restored"]
    [found] = searched([mutation], 3)
    assert found.words == mutation.words
    assert len(set(found.counts)) > 1
