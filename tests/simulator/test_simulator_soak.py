"""A hundred thousand schedules, on two cores. `RAYSGD_SIMULATOR_FIRST` says with which seed to begin."""

from __future__ import annotations

import os

import pytest

from tests.simulator.many import broken_in, report

NUM_SCHEDULES = 100_000
MOST_TOLD = 5


@pytest.mark.soak
def test_all_invariants_hold_in_a_hundred_thousand_schedules() -> None:
    first = int(os.environ.get("RAYSGD_SIMULATOR_FIRST", "0"))
    broken = [seed for block, _ in broken_in(first, NUM_SCHEDULES, 2) for seed in block]
    reports = [report(seed) for seed in broken[:MOST_TOLD]]
    assert not broken, f"{len(broken)} schedules are broken, {broken[:50]}\n\n" + "\n\n".join(reports)
