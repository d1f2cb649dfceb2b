"""Training functions: the cost of a report, a large checkpoint and the failure of a worker.

    python examples/benchmarks/function_api.py [--smoke-test] [--num-workers 2] [--repetitions 3] [--peers ray_train]

A report: seconds from the call in the worker until the driver's callback has it and, for raysgd, from one callback
through the function to the next. A checkpoint: seconds for which saving a state of 200 MiB blocks the function, the
first time and later, with a pause in between as in a training. A loss: seconds from the SIGKILL of a worker until the
function has begun again on all workers.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _functions as functions
from _common import (
    MIB,
    OWN,
    RAY_TRAIN_FAST_POLL,
    Report,
    Target,
    choose_peers,
    dispatch,
    make_parser,
    ray_cluster,
    run_job,
    take_turns,
)

PEERS = {"ray_train": "ray.train", "ray_train_fast_poll": "ray.train"}
_FIGURES = {
    "to_callback_s": "report -> callback, s",
    "cycle_s": "callback -> function -> callback, s",
    "first_stall_s": "first save of 200 MiB, s",
    "stall_s": "later save, s",
    "recovery_s": "SIGKILL -> function begins again, s",
}
_ENVIRONMENTS = {"ray_train_fast_poll": RAY_TRAIN_FAST_POLL}


def run_raysgd(num_reports: int, num_bytes: int, pause_s: float) -> dict[str, float]:
    """Run `raysgd.train`."""
    from raysgd import train
    from raysgd.train import Trainer, TrainingCallback

    delays: list[float] = []
    arrivals: list[float] = []

    class Note(TrainingCallback):
        def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
            arrivals.append(time.time())
            delays.append(arrivals[-1] - results[0]["sent"])

    def report_and_save() -> list[float]:
        for _ in range(num_reports):
            train.report(sent=time.time())
        state = functions.state_of(num_bytes)
        return functions.stalls(lambda: train.save_checkpoint(**state), pause_s)

    def lose(config: dict[str, Any]) -> None:
        if functions.die_or_note(Path(config["folder"]), train.world_rank(), 2):
            train.report(waits=True)
            time.sleep(60)

    with tempfile.TemporaryDirectory(prefix="bench-") as name, ray_cluster(2, object_store_mib=1024):
        single = Trainer("torch", num_workers=1, logdir=name)
        single.start()
        [(first_stall_s, *stalls)] = single.run(report_and_save, callbacks=[Note()])
        single.shutdown()
        pair = Trainer("torch", num_workers=2, logdir=name)
        pair.start()
        pair.run(lose, {"folder": name})
        pair.shutdown()
        recovery_s = functions.recovery_s(Path(name))
    return {
        "to_callback_s": statistics.median(delays),
        "cycle_s": statistics.median(after - before for before, after in itertools.pairwise(arrivals)),
        "first_stall_s": first_stall_s,
        "stall_s": statistics.median(stalls),
        "recovery_s": recovery_s,
    }


def run_ray_train(num_reports: int, num_bytes: int, pause_s: float) -> dict[str, float]:
    """Run the current Ray Train; its callbacks run in its controller."""
    import torch
    from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, UserCallback, get_context, report
    from ray.train.torch import TorchTrainer

    class Note(UserCallback):
        def __init__(self, path: Path) -> None:
            self.path = path

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            if "sent" in metrics[0]:
                with open(self.path, "a") as file:
                    file.write(f"{time.time() - metrics[0]['sent']}\n")

    def report_and_save(config: dict[str, Any]) -> None:
        for _ in range(num_reports):
            report({"sent": time.time()})
        state = functions.state_of(num_bytes)

        def save() -> None:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state, Path(folder) / "state.pt")
                report({"saved": True}, checkpoint=Checkpoint.from_directory(folder))

        Path(config["folder"], "stalls").write_text(json.dumps(functions.stalls(save, pause_s)))

    def lose(config: dict[str, Any]) -> None:
        if functions.die_or_note(Path(config["folder"]), get_context().get_world_rank(), 2):
            time.sleep(60)

    with tempfile.TemporaryDirectory(prefix="bench-") as name, ray_cluster(3, object_store_mib=1024):
        folder = Path(name)
        run = functools.partial(RunConfig, storage_path=name)
        TorchTrainer(
            report_and_save,
            train_loop_config={"folder": name},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=run(name="reports", callbacks=[Note(folder / "delays")]),
        ).fit()
        TorchTrainer(
            lose,
            train_loop_config={"folder": name},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=run(name="loss", failure_config=FailureConfig(max_failures=1)),
        ).fit()
        delays = [float(line) for line in (folder / "delays").read_text().split()]
        first_stall_s, *stalls = json.loads((folder / "stalls").read_text())
        return {
            "to_callback_s": statistics.median(delays),
            "first_stall_s": first_stall_s,
            "stall_s": statistics.median(stalls),
            "recovery_s": functions.recovery_s(folder),
        }


ROLES = {OWN: run_raysgd, "ray_train": run_ray_train, "ray_train_fast_poll": run_ray_train}


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    sizes = {"num_reports": 200, "num_bytes": 200 * MIB, "pause_s": 3.0}
    if arguments.smoke_test:
        arguments.repetitions, sizes = 1, {"num_reports": 5, "num_bytes": 4 * MIB, "pause_s": 0.1}
    report = Report("function_api", arguments, peers)
    jobs = {
        name: functools.partial(
            run_job,
            __file__,
            name,
            environment=_ENVIRONMENTS.get(name),
            **{**sizes, "num_reports": min(sizes["num_reports"], 10) if name != OWN else sizes["num_reports"]},
        )
        for name in (OWN, *peers.selected)
    }
    runs = take_turns(jobs, arguments.repetitions, report)
    medians = report.figures("Training functions", _FIGURES, runs)
    report.finish(
        [
            Target("report to the callback and back, s", 0.003, True, medians[OWN, "cycle_s"]),
            Target("raysgd / Ray Train, first save of 200 MiB", 0.05, True, _ratio(medians, "first_stall_s")),
            Target("raysgd / Ray Train, later save", 0.05, True, _ratio(medians, "stall_s")),
            Target("raysgd / Ray Train, recovery", 0.5, True, _ratio(medians, "recovery_s")),
        ]
    )


def _ratio(medians: dict[tuple[str, str], float], figure: str) -> float | None:
    other = medians.get(("ray_train", figure))
    return None if other is None else medians[OWN, figure] / other


if __name__ == "__main__":
    main()
