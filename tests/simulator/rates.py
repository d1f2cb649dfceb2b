"""How many schedules it takes to find each fault of the table, by random seeds alone.

python -m tests.simulator.rates --searches 20
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

from tests.simulator.mutations import MUTATIONS, Mutation
from tests.simulator.running import quiet, run
from tests.simulator.schedule import drawn

MOST_SCHEDULES = 2000
APART = 10**6
"""Between the first seeds of two searches."""

FROM_OUTSIDE = (
    "a hold is agreed on though ranks disagree",
    "each rank gives its newest snapshot inside a call",
    "silent ranks count as survivors",
    "a token is kept though another process is rank 0",
    "a snapshot is awaited of a rank 0 that was lost",
    "a new worker owes the answers of the lost one",
    "workers that do not join after all are left over",
    "a call that broke off goes on from inside",
    "a dead standby worker steps in",
    "a snapshot inside a call covers one call less",
    "where survivors live is mixed up",
)
"""Faults that were put in by someone who had not seen the simulator, and that it did not find at the time."""

_Z = 1.96


@dataclass(frozen=True)
class Searches:
    """What the searches for one fault came to.

    Attributes:
        words: The fault.
        counts: For each search, how many schedules it took; None for one that found nothing.
    """

    words: str
    counts: Sequence[int | None]

    @property
    def found(self) -> list[int]:
        return [count for count in self.counts if count is not None]

    def as_row(self) -> str:
        median = f"{statistics.median(self.found):.0f}" if self.found else ""
        low, high = interval(len(self.found), len(self.counts))
        return f"| {self.words} | {len(self.found)} of {len(self.counts)} | {low:.0%} to {high:.0%} | {median} |"


def interval(num_found: int, num: int) -> tuple[float, float]:
    """The interval of Wilson, 95 %, for a share that was seen in so many tries."""
    share, spread = num_found / num, _Z**2 / num
    middle = share + spread / 2
    half = _Z * math.sqrt(share * (1 - share) / num + spread / num / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def is_for_weights(mutation: Mutation) -> bool:
    """Whether a fault is in the half by which the weights of the seeds were chosen."""
    return zlib.crc32(mutation.words.encode()) % 2 == 0


def chosen(faults: str) -> list[Mutation]:
    """The faults of one half, or those from outside, which are in both."""
    if faults == "outside":
        return [mutation for mutation in MUTATIONS if mutation.words in FROM_OUTSIDE]
    return [mutation for mutation in MUTATIONS if is_for_weights(mutation) == (faults == "weights")]


def searched(mutations: Iterable[Mutation], num_searches: int) -> Iterator[Searches]:
    """Searches for each fault so many times, each time with seeds of its own."""
    firsts = [APART * (index + 1) for index in range(num_searches)]
    for mutation in mutations:
        yield Searches(mutation.words, [search(mutation, first) for first in firsts])


def search(mutation: Mutation, first: int, most: int = MOST_SCHEDULES) -> int | None:
    """How many schedules it takes to find a fault, from this seed on; None where `most` do not find it."""
    with quiet():
        with mock.patch.object(mutation.owner, mutation.name, mutation.replacement):
            found = next((seed for seed in range(first, first + most) if run(drawn(seed)).broken), None)
        assert found is None or run(drawn(found)).broken is None, f"schedule {found} is broken without any fault"
    return None if found is None else found - first + 1


def as_table(all_searches: Iterable[Searches]) -> str:
    """The faults that some search did not find, least found first; then those that each found, and all of them."""
    ordered = sorted(all_searches, key=lambda each: len(each.found))
    missed = [each for each in ordered if len(each.found) < len(each.counts)]
    others = ordered[len(missed) :]
    sums = _together(f"{len(others)} others", others), _together(f"all {len(ordered)}", ordered)
    head = f"| fault | found within {MOST_SCHEDULES} | 95 % interval | schedules, median |", "|---|---|---|---|"
    return "\n".join([*head, *(each.as_row() for each in [*missed, *sums])])


def _together(words: str, all_searches: Iterable[Searches]) -> Searches:
    return Searches(words, [count for each in all_searches for count in each.counts])


def main() -> None:
    """Prints the table of the half that the weights were not chosen by, or another one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--searches", type=int, default=20, help="how many for each fault, each with seeds of its own")
    parser.add_argument(
        "--faults",
        choices=("counted", "weights", "outside"),
        default="counted",
        help="the half that the weights were not chosen by, the other half, or those that someone else put in",
    )
    arguments = parser.parse_args()
    threading.excepthook = lambda args: None  # a fault may well end a thread
    print(as_table(searched(chosen(arguments.faults), arguments.searches)))


if __name__ == "__main__":
    main()
