"""Makes a schedule that breaks an invariant as small as it gets, and says how to run it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulator.running import Verdict, run
from tests.simulator.schedule import SIMPLER, Schedule, size

_MOST_RUNS = 400


def shrunk(schedule: Schedule, is_broken: Callable[[Schedule], bool], most_runs: int = _MOST_RUNS) -> Schedule:
    """The smallest schedule that is found which is still broken: fewer faults and calls, then everything simpler."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(schedule):
            most_runs -= 1
            if most_runs < 0:
                return schedule
            if size(candidate) < size(schedule) and is_broken(candidate):
                schedule, is_smaller = candidate, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that have a little less."""
    for index in range(len(schedule.faults)):
        yield replace(schedule, faults=schedule.faults[:index] + schedule.faults[index + 1 :])
    for index in reversed(range(len(schedule.ops))):
        yield replace(schedule, ops=schedule.ops[:index] + schedule.ops[index + 1 :])
    if schedule.num_workers > 2:
        fewer = schedule.num_workers - 1
        yield replace(schedule, num_workers=fewer, min_workers=min(schedule.min_workers, fewer))
    plain = Schedule(schedule.seed)
    for name in SIMPLER:
        if getattr(schedule, name) != getattr(plain, name):
            yield replace(schedule, **{name: getattr(plain, name)})
    if len(schedule.nodes) > 1:
        yield replace(schedule, nodes=(sum(schedule.nodes),))
    if schedule.num_samples > 8:
        yield replace(schedule, num_samples=max(8, schedule.num_samples // 2))


def told(seed: int | None, schedule: Schedule, verdict: Verdict) -> str:
    """All that is needed to look into a broken schedule."""
    smallest = shrunk(schedule, lambda each: run(each).broken is not None)
    again = run(smallest)
    return "\n".join(
        [
            f"{verdict.broken}",
            f"Run it again: python -m tests.simulator {seed if seed is not None else repr(schedule.to_json())}",
            f"The smallest schedule found: python -m tests.simulator '{smallest.to_json()}'",
            f"It is broken by: {again.broken}",
            *again.log,
        ]
    )
