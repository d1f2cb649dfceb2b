"""Runs many schedules, in several processes."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulator.cells import rows_of
from tests.simulator.running import Simulation, quiet, run
from tests.simulator.schedule import drawn
from tests.simulator.shrinking import told

BLOCK = 500


def broken_in(first: int, num_schedules: int, num_processes: int) -> Iterator[tuple[list[int], Counter[int]]]:
    """The seeds whose schedules break an invariant, block by block, from `first` on, and which rows they visit."""
    context = multiprocessing.get_context("spawn")
    end = first + num_schedules
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(partial(_broken_of, end), range(first, end, BLOCK))


def _broken_of(end: int, first: int) -> tuple[list[int], Counter[int]]:
    broken: list[int] = []
    counts: Counter[int] = Counter()
    with quiet():
        for seed in range(first, min(first + BLOCK, end)):
            simulation = Simulation(drawn(seed))
            if simulation.run().broken is not None:
                broken.append(seed)
            counts += rows_of(simulation.transitions.visited)
    return broken, counts


def report(seed: int) -> str:
    """What became of a broken schedule, and the smallest one like it."""
    schedule = drawn(seed)
    return told(seed, schedule, run(schedule))
