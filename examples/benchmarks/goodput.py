"""Goodput: the share of the time that goes into steps that count, while workers are killed repeatedly.

    python examples/benchmarks/goodput.py [--smoke-test] [--rates 15:150,60:300] [--rows FILE] [--contenders NAME,...]

All contenders train the same model on the same samples with two workers, and lose a random worker at fixed intervals,
from the first step on. The seed is the same for all. A step also sleeps for 20 ms, in place of a device that
computes, so that two cores are enough for the workers and for a spare. If a remaining worker computes the whole batch
(`split_batches`), it sleeps twice as long.

Goodput is the time of the steps that count in a run without kills, divided by their time in the run with kills, both
from the beginning of the first step to the end of the last. Each run with kills has a run without kills before and
after it, which shows whether the machine became slower or faster. The model itself counts the uses of the samples,
see `_counted`. Repeated samples are those of steps that a kill interrupted, and of steps that were rolled back.

torchft counts steps instead of samples: a step of the remaining worker counts as a step of both, and the samples of
the other worker, and of steps that it discards, are lost. Lost samples do not count, so its goodput is smaller by
this amount.

`--drained` measures something else: eight workers on as many nodes take 1,600 steps, and four times Ray is told that
a node will be removed in ten seconds. raysgd leaves the node after the step; Ray Train saves when it is told, as in
its guide, and starts again when the node is gone. Repeated steps are wasted.

The whole table takes about an hour. Each finished row is written to the file of `--rows`; if you run the same command
again, it measures only the missing rows. `docs/make_tables.py` and `docs/images/make_charts.py` show the file.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _common import OWN, JobError, Report, Target, choose_peers, dispatch, machine, make_parser, run_job
from _contenders import run_ray_train, run_raysgd, run_torchft, run_torchrun
from _counted import BATCH_SIZE, NUM_SAMPLES, NUM_WORKERS, STEPS_OF_PASS
from _torchft import PYTHON as TORCHFT

PEERS = {"torchrun": "torch", "torchft": str(TORCHFT), "torchft_tuned": str(TORCHFT), "ray_train": "ray.train"}
GUESSED_STEP_S = 0.025
START_S = 15.0  # approximate time of a run before its first and after its last step
CALM_S = 30.0
PATIENCE = 3  # times the useful seconds; a slower contender counts as failed

OWN_WAYS: dict[str, dict[str, Any]] = {
    f"{OWN}, spare": {"spare_workers": 1},
    f"{OWN}, going on": {"recovery": {"wait_for_workers": False, "resize_interval_s": 0.5}},
    f"{OWN}, new process": {"recovery": {"wait_for_workers": True, "resize_interval_s": None}},
    f"{OWN}, split batches": {"split_batches": True},
    f"{OWN}, split batches, new process": {"split_batches": True, "recovery": {"wait_for_workers": True}},
}
BARS = {
    (f"{OWN}, spare", 15): 0.93,
    (f"{OWN}, spare", 60): 0.97,
    (f"{OWN}, new process", 15): 0.84,
    (f"{OWN}, new process", 60): 0.95,
}
FIGURES = {
    "goodput": "goodput",
    "kills": "kills",
    "samples_lost": "samples lost",
    "samples_twice": "samples used twice",
    "again": "samples done again, of 100",
    "calm_differ": "runs without kills differ by, of 100",
    "driver_mib_grown": "driver grew by, MiB",
    "driver_fds_grown": "by open files",
    "store_mib_grown": "its object store by, MiB",
    "load": "load at the end",
}
DRAINED_FIGURES = {"wall_s": "seconds", "kills": "nodes that went", "wasted": "steps done again"}
ROLES = {
    OWN: run_raysgd,
    "torchrun": run_torchrun,
    "torchft": run_torchft,
    "torchft_tuned": functools.partial(run_torchft, peer="torchft_tuned"),
    "ray_train": run_ray_train,
}

DRAINED = (OWN, "ray_train")
STEPS_DRAINED, NODES_DRAINED = 1600, 8

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The measurement plan of one row.

    Attributes:
        contender: Name in the table.
        every_s: Seconds from one kill to the next.
        seconds: Approximate duration of the steps without kills.
        seed: Seed for the choice of victims.
        calm_s: Approximate duration of a run without kills.
        num_calm: Number of such runs: one before, and one after.
        max_kills: Maximum number of kills; None for no limit.
    """

    contender: str
    every_s: float
    seconds: float
    seed: int
    calm_s: float = CALM_S
    num_calm: int = 2
    max_kills: int | None = None

    @property
    def patience_s(self) -> float:
        """Return the time after which the run with kills counts as failed."""
        return 120 + PATIENCE * self.seconds

    @property
    def expected_s(self) -> float:
        """Return the approximate duration of the row."""
        return self.num_calm * (self.calm_s + START_S) + 1.25 * self.seconds + START_S

    def row(self) -> Row:
        """Measure the row.

        Raises:
            JobError: The contender failed, or did not finish.
        """
        calm = [self._calm()]
        run = self._disturbed()
        calm += [self._calm() for _ in range(self.num_calm - 1)]
        mean = sum(calm) / len(calm)
        run["goodput"] = goodput_of(run, mean, _num_passes(self.seconds))
        run["calm_differ"] = 100 * (max(calm) - min(calm)) / mean
        return {**asdict(self), **run, "load": os.getloadavg()[0], "cpu": machine()["cpu"]}

    def _calm(self) -> float:
        """Return the seconds of an epoch without kills and without spares."""
        num_passes = _num_passes(self.calm_s)
        run = run_job(__file__, self._role, timeout_s=120 + PATIENCE * self.calm_s, num_passes=num_passes, kills=None)
        return float(run["wall_s"] / num_passes)

    def _disturbed(self) -> Row:
        kills = {"every_s": self.every_s, "seed": self.seed, "max_kills": self.max_kills}
        options = dict(OWN_WAYS.get(self.contender, {}))
        if self._role == OWN:
            options["patience_s"] = self.patience_s - 5.0
        num_passes, limit_s = _num_passes(self.seconds), self.patience_s
        row: Row = run_job(__file__, self._role, timeout_s=limit_s, num_passes=num_passes, kills=kills, **options)
        return row

    @property
    def _role(self) -> str:
        return OWN if self.contender in OWN_WAYS else self.contender


def goodput_of(run: Row, pass_s: float, num_passes: int) -> float:
    """Return the share of the time that went into samples that count, given the seconds of an epoch without kills."""
    return float(pass_s * num_passes / run["wall_s"] * (1 - run["samples_lost"] / (num_passes * NUM_SAMPLES)))


def _num_passes(seconds: float) -> int:
    return max(1, round(seconds / (GUESSED_STEP_S * STEPS_OF_PASS)))


class Rows:
    """Finished rows, in a file if there is one.

    Args:
        path: The file; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: list[Row] = json.loads(path.read_text()) if path is not None and path.exists() else []

    def of(self, plan: Plan) -> Row | None:
        """Return the row that was measured with this plan; None if it is missing."""
        wanted = asdict(plan)
        return next((row for row in self._rows if all(row[name] == wanted[name] for name in wanted)), None)

    def add(self, row: Row) -> None:
        """Store a row."""
        self._rows.append(row)
        if self._path is not None:
            partial = self._path.with_suffix(".part")
            partial.write_text(json.dumps(self._rows, indent=1) + "\n")
            partial.replace(self._path)


def measured(plans: Sequence[Plan], rows: Rows, report: Report) -> dict[Plan, Row]:
    """Return a row for each plan, if the contender finishes. Earlier measurements are reused."""
    missing = [plan for plan in plans if rows.of(plan) is None]
    print(
        f"{len(missing)} of {len(plans)} rows to measure: {sum(p.expected_s for p in missing) / 60:.0f} minutes, about"
    )
    for plan in missing:
        try:
            rows.add(plan.row())
        except JobError as error:
            report.failed(f"{plan.contender}, one kill each {plan.every_s:g} s", error)
        else:
            print(json.dumps(rows.of(plan)), flush=True)
    found = {plan: rows.of(plan) for plan in plans}
    return {plan: row for plan, row in found.items() if row is not None}


def main() -> None:
    dispatch(ROLES)
    arguments = _parser().parse_args()
    peers = choose_peers(arguments, PEERS)
    plans = _plans(arguments, [*OWN_WAYS, *peers.selected])
    report = Report("goodput", arguments, peers)
    if arguments.drained:
        _report_drained(arguments, [OWN, *peers.selected], report)
        return
    found = measured(plans, Rows(arguments.rows), report)
    goodput = _report(report, found)
    targets = [
        Target(f"{name}, one kill each {every_s} s", bar, False, goodput.get((name, every_s)))
        for (name, every_s), bar in BARS.items()
    ]
    report.finish(targets)
    check(plans, found)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__.partition("\n")[0], repetitions=1, peers=PEERS)
    parser.add_argument(
        "--rates", default="15:150,60:300", help="seconds from one kill to the next, and useful seconds of that run"
    )
    parser.add_argument("--contenders", help=f"only some of: {'; '.join([*OWN_WAYS, *PEERS])} (separated by `;`)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims")
    parser.add_argument("--drained", action="store_true", help="nodes are told to go, and no worker is killed")
    parser.add_argument("--rows", type=Path, help="file for the rows that are finished, to go on from")
    return parser


def _plans(arguments: argparse.Namespace, names: Sequence[str]) -> list[Plan]:
    wanted = names if arguments.contenders is None else [each.strip() for each in arguments.contenders.split(";")]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise SystemExit(f"`--contenders {'; '.join(unknown)}`: known are {'; '.join(names)}")
    if arguments.smoke_test:
        return [Plan(name, 2.0, 5.0, arguments.seed, calm_s=5.0, num_calm=1, max_kills=1) for name in wanted]
    rates = [[float(each) for each in text.split(":")] for text in arguments.rates.split(",")]
    return [Plan(name, every_s, seconds, arguments.seed) for every_s, seconds in rates for name in wanted]


def _report(report: Report, found: Mapping[Plan, Row]) -> dict[tuple[str, float], float]:
    """Print a table for each rate; return the goodput of each contender at each rate."""
    goodput: dict[tuple[str, float], float] = {}
    for every_s in dict.fromkeys(plan.every_s for plan in found):
        runs = {plan.contender: [row] for plan, row in found.items() if plan.every_s == every_s}
        told = report.figures(f"One of {NUM_WORKERS} workers is killed every {every_s:g} s", FIGURES, runs)
        goodput.update({(name, every_s): value for (name, figure), value in told.items() if figure == "goodput"})
    return goodput


def _report_drained(arguments: argparse.Namespace, names: Sequence[str], report: Report) -> None:
    """Print the wasted steps of the contenders when nodes are drained."""
    num_nodes, num_drains = (2, 1) if arguments.smoke_test else (NODES_DRAINED, 4)
    global_batch = BATCH_SIZE * num_nodes
    num_passes = 1 if arguments.smoke_test else STEPS_DRAINED * global_batch // NUM_SAMPLES
    num_steps = num_passes * NUM_SAMPLES / global_batch
    every_s = num_steps * GUESSED_STEP_S / (num_drains + 1)
    drains = {"every_s": every_s, "seed": arguments.seed, "max_kills": num_drains}
    runs: dict[str, list[Row]] = {}
    for name in DRAINED:
        if name in names:
            row = run_job(__file__, name, timeout_s=1800, num_passes=num_passes, kills=drains, num_nodes=num_nodes)
            runs[name] = [{**row, "wasted": row["again"] * num_steps / 100}]
            print(json.dumps(runs[name][0]), flush=True)
    report.figures(
        f"{num_drains} of {num_nodes} nodes go, one after the other, in {num_steps:g} steps", DRAINED_FIGURES, runs
    )


def check(plans: Sequence[Plan], found: Mapping[Plan, Row]) -> None:
    """Check that raysgd loses no sample, uses none twice, and finishes."""
    for plan in plans:
        if plan.contender not in OWN_WAYS:
            continue
        what = f"{plan.contender}, one kill each {plan.every_s:g} s"
        if plan not in found:
            raise SystemExit(f"{what}: the run failed; see above")
        lost, twice = found[plan]["samples_lost"], found[plan]["samples_twice"]
        if lost or twice:
            raise SystemExit(f"{what}: {lost:g} samples were lost and {twice:g} used twice")


if __name__ == "__main__":
    main()
