"""Edit to next step: the time until live workers train with an edited class or config.

    python examples/benchmarks/reload.py [--smoke-test] [--repetitions 3]

Two workers train the small model of the recovery benchmark, and a tiny model. "Edit" is the time from the call of
`trainer.reload` with another class to the end of the first step after it, minus the time of a usual step; "update" is
the same for `trainer.update_config`. The class's own `setup` is part of an edit; its share, in the slower worker, is
in the table. It creates the model, and either creates its random data, too, or finds the data in the cache of a
function in another module, which no edit changes. "New trainer" is the alternative to an edit: save, stop the
workers, start a new trainer with the edited class, load, take a step.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from _workloads import STATES, StockOperator, Workload, config_of, kept_dataset

NUM_WORKERS = 2
MAKES_DATA = f"{OWN}, data made again"
TINY = f"{OWN}, tiny model"
NEW_TRAINER = f"{OWN}, new trainer"
_FIGURES = {
    "edit_s": "edit to next step, s",
    "setup_s": "of it `setup`, s",
    "update_s": "update to next step, s",
    "step_s": "a step, s",
    "restart_s": "save, new trainer, load, s",
}


class First(StockOperator):
    """The class before the edit."""

    def setup(self, config: dict[str, Any]) -> None:
        began = time.perf_counter()
        super().setup(config)
        self.setup_s = time.perf_counter() - began

    def make_dataset(self, workload: Workload, world_size: int) -> Any:
        if not self.config["keeps_data"]:
            return super().make_dataset(workload, world_size)
        return kept_dataset(workload.name, workload.num_steps, world_size)


class Edited(First):
    """The class after the edit: it reports another metric."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "edited": 1}


def make_trainer(operator_cls: type[Any], config: dict[str, Any]) -> Any:
    from raysgd import TorchTrainer

    return TorchTrainer(training_operator_cls=operator_cls, config=config, num_workers=NUM_WORKERS, use_gpu=False)


def take_step(trainer: Any) -> dict[str, Any]:
    """Take one step, after which the workers may still send the state for recovery."""
    result: dict[str, Any] = trainer.train(num_steps=1)
    return result


def seconds(*parts: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for part in parts:
        part()
    return time.perf_counter() - began


def run_live(workload: str, num_edits: int, keeps_data: bool = True) -> dict[str, list[float]]:
    """Measure edits of live workers."""
    found: dict[str, list[float]] = {name: [] for name in _FIGURES if name != "restart_s"}
    with ray_cluster(NUM_WORKERS), make_trainer(First, _config(workload, keeps_data)) as trainer:
        take_step(trainer)
        for number in range(num_edits):
            step = functools.partial(take_step, trainer)
            step_s = seconds(step)
            operator_cls = First if number % 2 else Edited
            edit_s = seconds(functools.partial(trainer.reload, operator_cls), step) - step_s
            assert ("edited" in trainer.train(num_steps=1)) == (operator_cls is Edited)
            setup_s = max(trainer.apply_all_operators(lambda operator: operator.setup_s))
            update_s = seconds(functools.partial(trainer.update_config, rate=0.1 / (number + 2)), step) - step_s
            figures = {"edit_s": edit_s, "setup_s": setup_s, "update_s": update_s, "step_s": step_s}
            for name, value in figures.items():
                found[name].append(value)
    return found


def run_new(workload: str, num_edits: int) -> dict[str, list[float]]:
    """Measure the same edit with a new trainer."""
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


def _config(workload: str, keeps_data: bool = False) -> dict[str, Any]:
    return config_of(STATES[workload].with_steps(100), NUM_WORKERS, rate=0.1, keeps_data=keeps_data)


def run_making_data(workload: str, num_edits: int) -> dict[str, list[float]]:
    """Measure edits if each `setup` creates its data."""
    return run_live(workload, num_edits, keeps_data=False)


ROLES = {OWN: run_live, MAKES_DATA: run_making_data, TINY: run_live, NEW_TRAINER: run_new}


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=3, peers={}).parse_args()
    peers = choose_peers(arguments, {})
    workloads = dict.fromkeys(ROLES, "recovery") | {TINY: "recovery_tiny"}
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
    targets = (OWN, TINY)
    report.finish(
        [Target(f"{name}: edit to next step, s", 0.1, True, medians.get((name, "edit_s"))) for name in targets]
    )


if __name__ == "__main__":
    main()
