"""Runs a schedule again and tells what happens: `python -m tests.simulator SEED`, or a schedule as JSON."""

from __future__ import annotations

import sys

from tests.simulator.running import run
from tests.simulator.schedule import Schedule, drawn
from tests.simulator.shrinking import told


def main(what: str) -> int:
    schedule = drawn(int(what)) if what.isdigit() else Schedule.from_json(what)
    print(schedule)
    verdict = run(schedule)
    print(*verdict.log, sep="\n")
    if verdict.broken is None:
        print("all invariants hold")
        return 0
    print(told(schedule.seed, schedule, verdict))
    return 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.simulator SEED | JSON")
    sys.exit(main(sys.argv[1]))
