"""Programs of each kind in runs in which workers are killed again and again, and torchft beside them.

    python -m tests.torch.torn_run --program gan "own loop" "function of fit" torchft --kills 30

A third of the kills falls between two steps of optimizers, a third into an exchange, a third anywhere. Prints one line
of JSON for each program with what was seen, and a table of it. torchft, with short time-outs, needs its environment,
which `make bench` creates; it goes on with the next batches, so there are no weights to compare.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import ray

from raysgd import Recovery
from raysgd.train import FailureConfig, RunConfig, ScalingConfig, Trainer
from raysgd.train import torch as for_torch
from tests.helpers.hygiene import RaySurroundings
from tests.helpers.trail import PLACES, Killer, Loss, losses_in
from tests.torch.torn import JOINT_BATCH, PROGRAMS, trainer_of, weights_of
from tests.train.elastic_functions import train_counting, undisturbed

NUM_WORKERS, NUM_STEPS, STEP_S = 3, 60, 0.005
RESIZE_CHECK_S = 1.0
FEWER, SPARE = "with fewer", "with a spare"
BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
Weights = list[float]
Pair = tuple[Weights, Weights]


class Told(logging.Handler):
    """Keeps what is logged of losses, with its time."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append((record.created, record.getMessage()))

    def of(self, loss: Loss, until: float) -> str:
        """What became of a loss."""
        return next((words for at, words in self.events if loss.at <= at < until and "resumed" in words), "")


def run_operator(program: str, folder: Path, killer: Killer, undo: bool | None, num_spares: int) -> Pair:
    """Trains an operator pass after pass; returns its weights, and those of a run in which nobody is killed."""
    config = {"num_steps": NUM_STEPS, "step_s": STEP_S}
    options = {
        "recovery": Recovery(undo=undo, wait_for_workers=False, resize_interval_s=RESIZE_CHECK_S),
        "spare_workers": num_spares,
    }
    num_passes = 1
    with trainer_of(program, folder, NUM_WORKERS, config=config, **options) as trainer:
        killer.start()
        while killer.is_alive():
            trainer.train()
            num_passes += 1
        trainer.train()
        weights = weights_of(trainer)
    with trainer_of(program, folder, NUM_WORKERS, config={"num_steps": NUM_STEPS}) as trainer:
        for _ in range(num_passes):
            trainer.train()
        return weights, weights_of(trainer)


def run_function(by_fit: bool, folder: Path, killer: Killer, undo: bool | None, num_spares: int) -> Pair:
    """Runs a function; returns the same."""
    config = {"folder": str(folder), "deaths": (), "step_s": STEP_S, "admits": True}
    killer.start()
    if by_fit:
        scaling = ScalingConfig(
            num_workers=(1, NUM_WORKERS),
            elastic=True,
            spare_workers=num_spares,
            elastic_resize_monitor_interval_s=RESIZE_CHECK_S,
        )
        for_torch.TorchTrainer(
            train_counting,
            train_loop_config=config,
            scaling_config=scaling,
            run_config=RunConfig(storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=-1)),
        ).fit()
    else:
        options: dict[str, Any] = {
            "spare_workers": num_spares,
            "recovery": Recovery(wait_for_workers=False, resize_interval_s=RESIZE_CHECK_S),
        }
        trainer = Trainer("torch", (1, NUM_WORKERS), logdir=folder / "runs", elastic=True, **options)
        trainer.start()
        trainer.run(train_counting, config)
        trainer.shutdown()
    return json.loads((folder / "weights.json").read_text()), undisturbed(int((folder / "last pass").read_text()))


def run_torchft(folder: Path, killer: Killer, undo: bool | None, num_spares: int) -> Pair:
    """Runs groups of torchft, in its own environment."""
    sys.path.insert(0, str(BENCHMARKS))
    from _torchft import run_groups

    killer.start()
    path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parents[1])])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        run_groups("torchft_tuned", NUM_WORKERS, [str(Path(__file__).with_name("torn_torchft.py")), str(folder)])
    return [], []


RUNS: dict[str, Callable[..., Pair]] = {
    **{name: lambda *arguments, name=name: run_operator(name, *arguments) for name in PROGRAMS},
    "function of Trainer": lambda *arguments: run_function(False, *arguments),
    "function of fit": lambda *arguments: run_function(True, *arguments),
    "torchft": run_torchft,
}


def train_with_kills(program: str, num_kills: int, undo: bool | None, num_spares: int, seed: int) -> dict[str, Any]:
    """Runs one program; returns what was seen."""
    told, logger, began = Told(), logging.getLogger("raysgd.engine.shared.group_events"), time.time()
    logger.addHandler(told)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killer = Killer(folder, num_kills, NUM_WORKERS, 4.0 if num_spares else 0.3, seed)  # until a spare is ready
        weights, wanted = RUNS[program](folder, killer, undo, num_spares)
        losses = losses_in(folder)
    logger.removeHandler(told)
    apart = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(weights, wanted, strict=True)]
    found = []
    for loss, later in zip(losses, [*(each.at for each in losses[1:]), float("inf")], strict=True):
        words = told.of(loss, later)
        in_flight = re.search(r"(\d+) in flight", words)
        is_whole = re.search(r"resumed with \d+ workers", words)
        found.append(
            {
                "seconds": loss.seconds,
                "batches": int(in_flight[1]) / JOINT_BATCH if in_flight else loss.num_failed,
                "where": [loss.place, *([SPARE if is_whole else FEWER] if "; resumed" in words else [])],
            }
        )
    return {
        "program": program,
        "seed": seed,
        "spares": num_spares,
        "took_s": time.time() - began,
        "kills": len(losses),
        "rejoins": sum("; resumed" in words for _, words in told.events),
        "rebuilds": sum("restarted all" in words for _, words in told.events),
        "apart": max(apart, default=float("nan")),
        "losses": found,
        "events": [words for _, words in told.events],
    }


def table_of(runs: Sequence[dict[str, Any]]) -> str:
    """What a loss costs: the median of the seconds, by where the kill falls and who goes on, and what is repeated."""
    columns = {**PLACES, FEWER: FEWER, SPARE: SPARE}
    heads = ["program", *columns.values(), "all", "90 %", "longest", "batches repeated", "weights apart"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for run in runs:
        times = {name: [each["seconds"] for each in run["losses"] if name in each["where"]] for name in columns}
        of_all = sorted(each["seconds"] for each in run["losses"])
        medians = [f"{statistics.median(found):.2f}" if found else "" for found in [*times.values(), of_all]]
        ranked = [f"{of_all[-(-len(of_all) * tenths // 10) - 1]:.2f}" for tenths in (9, 10)]
        batches = statistics.fmean(each["batches"] for each in run["losses"])
        cells = [run["program"], *medians, *ranked, f"{batches:.1f}", f"{run['apart']:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--program", choices=RUNS, nargs="+", default=["gan"], help="what is trained")
    parser.add_argument("--kills", type=int, default=30, help="how many")
    parser.add_argument("--undo", action="store_true", help="copy before each batch, not only where it is needed")
    parser.add_argument("--spares", type=int, default=1, help="workers that wait to step in")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all chance")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr, flush=True)
    ray.init(num_cpus=NUM_WORKERS + 1, include_dashboard=False)
    undo = arguments.undo or None
    runs = []
    for program in arguments.program:
        before = RaySurroundings.now()
        seen = train_with_kills(program, arguments.kills, undo, arguments.spares, arguments.seed)
        seen["leaks"] = before.leaks()
        print(json.dumps(seen), flush=True)
        runs.append(seen)
    print(table_of(runs))


if __name__ == "__main__":
    main()
