"""Bins of time, added up over ranks."""

from __future__ import annotations

import pytest

from raysgd.core.numbers.timing import BINS, RECOVERY, TimeLedger, TimeSpent, goodput_of


def test_every_bin_has_words_of_its_own() -> None:
    assert len(set(BINS.values())) == len(BINS)
    assert set(RECOVERY) <= set(BINS)


def test_all_of_the_time_is_in_the_bins() -> None:
    assert TimeSpent("a", {"useful": 1.5, "data": 0.5}).total_s == 2.0


def test_ranks_are_added_up_in_the_order_of_the_bins() -> None:
    ledger = TimeLedger({0: {"data": 1.0, "useful": 2.0}, 1: {"useful": 3.0, "driver": 0.0}})
    assert list(ledger.total().items()) == [("useful", 5.0), ("data", 1.0)]
    assert ledger.training_s == 6.0


@pytest.mark.parametrize(
    ("seconds", "goodput"),
    [
        ({}, None),
        ({"driver": 5.0, "start_up": 1.0, "evaluation": 2.0}, None),
        ({"useful": 3.0, "driver": 5.0}, 1.0),
        ({"useful": 3.0, "again": 1.0}, 0.75),
        ({"useful": 3.0, "snapshot": 1.0}, 0.75),
        *[({"useful": 1.0, "slower_rank": 2.0, name: 1.0}, 0.75) for name in RECOVERY],
    ],
)
def test_goodput_is_what_was_not_lost(seconds: dict[str, float], goodput: float | None) -> None:
    assert goodput_of(seconds) == goodput


def test_the_largest_avoidable_part_adds_recoveries_up() -> None:
    ledger = TimeLedger({0: {"useful": 5.0, "data": 2.0, "again": 1.0, "recovery_form": 2.0, "driver": 90.0}})
    assert ledger.largest_avoidable() == ("recovering from failures", 0.3)
    assert TimeLedger().largest_avoidable() is None


def test_a_rank_that_told_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="`rank=3` has no ledger: no rank has reported yet; soon"):
        TimeLedger(notes=("soon",)).of(3)


def test_the_text_leaves_out_what_is_next_to_nothing() -> None:
    text = str(TimeLedger({0: {"useful": 99.99, "data": 0.01, "again": 0.0}}, ("that is all",)))
    assert text == "goodput 100.0%; useful steps 100.0%; that is all"
