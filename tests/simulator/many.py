"""Runs many schedules, in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulator.running import quiet, run
from tests.simulator.schedule import drawn
from tests.simulator.shrinking import told

BLOCK = 500


def broken_in(first: int, num_schedules: int, num_processes: int) -> Iterator[list[int]]:
    """The seeds whose schedules break an invariant, block by block, from `first` on."""
    context = multiprocessing.get_context("spawn")
    end = first + num_schedules
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(partial(_broken_of, end), range(first, end, BLOCK))


def _broken_of(end: int, first: int) -> list[int]:
    with quiet():
        return [seed for seed in range(first, min(first + BLOCK, end)) if run(drawn(seed)).broken is not None]


def report(seed: int) -> str:
    """What became of a broken schedule, and the smallest one like it."""
    schedule = drawn(seed)
    return told(seed, schedule, run(schedule))
