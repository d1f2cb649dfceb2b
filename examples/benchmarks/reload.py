"""Edit to next step: what it takes until live workers train with an edited class or config.

    python examples/benchmarks/reload.py [--smoke-test] [--repetitions 3]

Two workers train the small model of the recovery benchmark, and a tiny one. "Reload" is the time from the call of
`trainer.reload` with another class to the end of the first step behind it; "update" the same for
`trainer.update_config`. Of a reload, "setup" is what the class's own `setup` takes in the slower worker, most of it to
make the random data, and "step" the step; what is left is the library's part. "New trainer" is what takes its place
elsewhere: save, end the workers, start a new trainer with the edited class, load, take a step.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from _workloads import STATES, StockOperator, config_of

NUM_WORKERS = 2
TINY = f"{OWN}, tiny model"
NEW_TRAINER = f"{OWN}, new trainer"
_FIGURES = {
    "reload_s": "reload, s",
    "setup_s": "of it setup, s",
    "step_s": "of it step, s",
    "own_s": "the rest, s",
    "update_s": "update, s",
    "restart_s": "save, new trainer, load, s",
}


class First(StockOperator):
    """The class as it was."""

    def setup(self, config: dict[str, Any]) -> None:
        began = time.perf_counter()
        super().setup(config)
        self.setup_s = time.perf_counter() - began


class Edited(First):
    """The class after the edit: it reports one number more."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "edited": 1}


def make_trainer(operator_cls: type[Any], config: dict[str, Any]) -> Any:
    from raysgd import TorchTrainer

    return TorchTrainer(training_operator_cls=operator_cls, config=config, num_workers=NUM_WORKERS, use_gpu=False)


def take_step(trainer: Any) -> dict[str, Any]:
    """One step, after which the workers may still send what a recovery starts from."""
    result: dict[str, Any] = trainer.train(num_steps=1)
    return result


def seconds(*parts: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for part in parts:
        part()
    return time.perf_counter() - began


def run_live(workload: str, num_edits: int) -> dict[str, list[float]]:
    """Edits of live workers."""
    found: dict[str, list[float]] = {name: [] for name in _FIGURES if name != "restart_s"}
    with ray_cluster(NUM_WORKERS), make_trainer(First, _config(workload)) as trainer:
        take_step(trainer)
        for number in range(num_edits):
            step = functools.partial(take_step, trainer)
            step_s = seconds(step)
            operator_cls = First if number % 2 else Edited
            reload_s = seconds(functools.partial(trainer.reload, operator_cls), step)
            assert ("edited" in trainer.train(num_steps=1)) == (operator_cls is Edited)
            setup_s = max(trainer.apply_all_operators(lambda operator: operator.setup_s))
            update_s = seconds(functools.partial(trainer.update_config, rate=0.1 / (number + 2)), step)
            figures = {"setup_s": setup_s, "step_s": step_s, "own_s": reload_s - setup_s - step_s}
            for name, value in {"reload_s": reload_s, "update_s": update_s, **figures}.items():
                found[name].append(value)
    return found


def run_new(workload: str, num_edits: int) -> dict[str, list[float]]:
    """The same edit by a new trainer."""
    found: dict[str, list[float]] = {"restart_s": []}
    with ray_cluster(NUM_WORKERS), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        trainer = make_trainer(First, _config(workload))
        try:
            take_step(trainer)
            began = time.perf_counter()
            path = trainer.save(Path(folder) / "last.pt")
            trainer.shutdown()
            trainer = make_trainer(Edited, _config(workload))
            trainer.load(path)
            take_step(trainer)
            found["restart_s"].append(time.perf_counter() - began)
        finally:
            trainer.shutdown()
    return found


def _config(workload: str) -> dict[str, Any]:
    return config_of(STATES[workload].with_steps(100), NUM_WORKERS, rate=0.1)


ROLES = {OWN: run_live, TINY: run_live, NEW_TRAINER: run_new}


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=3, peers={}).parse_args()
    peers = choose_peers(arguments, {})
    workloads = {OWN: "recovery", TINY: "recovery_tiny", NEW_TRAINER: "recovery"}
    num_edits = 10
    if arguments.smoke_test:
        arguments.repetitions, workloads, num_edits = 1, {TINY: "recovery_tiny"}, 2
    report = Report("reload", arguments, peers)
    jobs: dict[str, Callable[[], Any]] = {
        name: functools.partial(run_job, __file__, name, workload=workload, num_edits=num_edits)
        for name, workload in workloads.items()
    }
    runs = take_turns(jobs, arguments.repetitions, report)
    medians = report.figures("Edit to next step", _FIGURES, runs)
    report.finish(
        [
            Target(f"{TINY}: edit to next step, s", 0.1, True, medians.get((TINY, "reload_s"))),
            Target(f"{OWN}: edit to next step without setup and step, s", 0.1, True, medians.get((OWN, "own_s"))),
        ]
    )


if __name__ == "__main__":
    main()
