"""Runs a schedule again and tells what happens, or runs many of them.

python -m tests.simulator SEED
python -m tests.simulator JSON
python -m tests.simulator --schedules 100000 --processes 2
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulator.cells import rows
from tests.simulator.many import BLOCK, broken_in, report
from tests.simulator.running import run
from tests.simulator.schedule import Schedule, drawn
from tests.simulator.shrinking import told

MOST_TOLD = 5


def replay(what: str) -> int:
    """One schedule, with all that happens."""
    schedule = drawn(int(what)) if what.isdigit() else Schedule.from_json(what)
    print(schedule)
    verdict = run(schedule)
    print(*verdict.log, sep="\n")
    if verdict.broken is None:
        print("all invariants hold")
        return 0
    print(told(schedule.seed, schedule, verdict))
    return 1


def run_many(first: int, num_schedules: int, num_processes: int) -> int:
    """Many schedules, of which only the broken ones are told, and how often they visit each row of the table."""
    broken: list[int] = []
    counts: Counter[int] = Counter()
    began = time.monotonic()
    for index, (found, visited) in enumerate(broken_in(first, num_schedules, num_processes), start=1):
        broken += found
        counts += visited
        num_done, seconds = min(index * BLOCK, num_schedules), time.monotonic() - began
        print(f"\r{num_done} schedules in {seconds:.0f} s, {len(broken)} broken", end="", file=sys.stderr, flush=True)
    print(*(f"\n{counts[line]:8}  {words}" for line, words in rows().items()), sep="")
    print(f"{sum(counts[line] > 0 for line in rows())} of {len(rows())} rows of the table were visited")
    print(f"{num_schedules} schedules from seed {first} on in {time.monotonic() - began:.0f} s, {len(broken)} broken")
    if broken:
        print(f"seeds: {broken[:50]}", *map(report, broken[:MOST_TOLD]), sep="\n\n")
    return int(bool(broken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schedule", nargs="?", help="a seed, or a schedule as JSON")
    parser.add_argument("--schedules", type=int, help="instead: how many to run")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if (arguments.schedule is None) == (arguments.schedules is None):
        parser.error("need a schedule, or `--schedules`")
    if arguments.schedule is not None:
        return replay(arguments.schedule)
    return run_many(arguments.first, arguments.schedules, arguments.processes)


if __name__ == "__main__":
    sys.exit(main())
