"""How often random seeds find a fault, for all faults that the weights of the seeds were not chosen by."""

from __future__ import annotations

import statistics

import pytest

from tests.simulator.rates import as_table, chosen, searched

NUM_SEARCHES = 20


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # what a fault may well do
def test_nine_of_ten_searches_find_a_fault_that_no_weight_was_chosen_by() -> None:
    found = list(searched(chosen("counted"), NUM_SEARCHES))
    assert statistics.mean(count is not None for each in found for count in each.counts) > 0.9, as_table(found)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nearly_all_faults_that_someone_else_put_in_are_found_by_most_searches() -> None:
    found = list(searched(chosen("outside"), NUM_SEARCHES))
    missed = [each.words for each in found if len(each.found) < NUM_SEARCHES / 2]
    assert len(missed) <= 2, as_table(found)
