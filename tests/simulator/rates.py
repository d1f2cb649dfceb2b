"""How many schedules it takes to find each fault of the table, by random seeds alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from unittest import mock

from tests.simulator.mutations import MUTATIONS, Mutation
from tests.simulator.running import quiet, run
from tests.simulator.schedule import drawn

MOST_SCHEDULES = 2000
APART = 10**6
"""Between the first seeds of two searches."""


@dataclass(frozen=True)
class Search:
    """What searches for one fault came to.

    Attributes:
        words: The fault.
        counts: For each search, how many schedules it took; None where all of them found nothing.
    """

    words: str
    counts: tuple[int | None, ...]


def searched(indices: list[int], num_searches: int, num_processes: int = 2) -> Iterator[Search]:
    """Searches for these faults of the table, each several times."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(partial(_search, num_searches), indices)


def _search(num_searches: int, index: int) -> Search:
    mutation = MUTATIONS[index]
    with quiet(), mock.patch.object(mutation.owner, mutation.name, mutation.replacement):
        return Search(mutation.words, tuple(_count(mutation, APART * (each + 1)) for each in range(num_searches)))


def _count(mutation: Mutation, first: int) -> int | None:
    found = (number for number in range(MOST_SCHEDULES) if run(drawn(first + number)).broken is not None)
    number = next(found, None)
    return None if number is None else number + 1
