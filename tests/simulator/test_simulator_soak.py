"""A hundred thousand schedules, on two cores. `RAYSGD_SIMULATOR_FIRST` says with which seed to begin."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulator.running import run
from tests.simulator.schedule import drawn
from tests.simulator.shrinking import told

NUM_SCHEDULES = 100_000
BLOCK = 500
MOST_TOLD = 5


def broken_of(first: int) -> list[int]:
    """The seeds of a block whose schedules break an invariant."""
    return [seed for seed in range(first, first + BLOCK) if run(drawn(seed)).broken is not None]


@pytest.mark.soak
def test_all_invariants_hold_in_a_hundred_thousand_schedules() -> None:
    first = int(os.environ.get("RAYSGD_SIMULATOR_FIRST", "0"))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        blocks = pool.map(broken_of, range(first, first + NUM_SCHEDULES, BLOCK))
        broken = [seed for block in blocks for seed in block]
    reports = [told(seed, drawn(seed), run(drawn(seed))) for seed in broken[:MOST_TOLD]]
    assert not broken, f"{len(broken)} schedules are broken, {broken[:50]}\n\n" + "\n\n".join(reports)
