"""Functions that go on over losses, for many seeds, and with faults that the seeds have to find."""

from __future__ import annotations

import pytest

from tests.simulator.function_faults import FAULTS
from tests.simulator.functions import first_broken
from tests.simulator.mutations import Mutation

NUM_SEEDS = 20
MOST_SEEDS = 300


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_schedules_break_nothing() -> None:
    assert first_broken(range(NUM_SEEDS)) is None


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_many_schedules_break_nothing() -> None:
    assert first_broken(range(1000, 2500)) is None


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # what a fault may well do
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.words)
def test_a_fault_is_found(fault: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault.owner, fault.name, fault.replacement)
    found = first_broken(range(MOST_SEEDS))
    assert found is not None, f"not found: {fault.words}"
