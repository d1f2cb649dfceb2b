"""The simulator finds faults of the engine: each of a table is put in, and some schedule has to break an invariant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulator.mutations import MUTATIONS, Mutation
from tests.simulator.running import run
from tests.simulator.schedule import Schedule, drawn

pytestmark = pytest.mark.soak

MOST_SEEDS = 400
"""Where a change of the engine or of the simulator made another schedule out of the seeds of the table."""

NOT_FOUND = {
    "a call that broke off goes on from inside": "a replica begins again if what it has begun is of another call",
}
"""Faults that no schedule of thousands finds any more, and why."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # what a fault may well do
@pytest.mark.parametrize(
    "mutation", [each for each in MUTATIONS if each.words not in NOT_FOUND], ids=lambda mutation: mutation.words
)
def test_a_fault_of_the_engine_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.replacement)
    assert any(run(schedule).broken for schedule in schedules(mutation)), f"not found: {mutation.words}"


def test_the_schedules_of_the_table_break_nothing_without_its_faults() -> None:
    schedules = {schedule for mutation in MUTATIONS for schedule in mutation.schedules}
    assert not [schedule for schedule in schedules if run(schedule).broken]


def schedules(mutation: Mutation) -> Iterator[Schedule]:
    yield from mutation.schedules
    yield from map(drawn, (*mutation.seeds, *range(MOST_SEEDS)))


def test_the_table_is_long_enough_and_has_each_fault_once() -> None:
    assert len({mutation.words for mutation in MUTATIONS}) == len(MUTATIONS) >= 30
    assert len({mutation.replacement for mutation in MUTATIONS}) == len(MUTATIONS)
