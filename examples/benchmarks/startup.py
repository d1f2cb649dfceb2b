"""Time to the first training step: from the return of `ray.init` to the end of the first step on all ranks.

    python examples/benchmarks/startup.py [--smoke-test] [--num-workers 2] [--repetitions 7] [--peers bare]

Every repetition is a separate program, and the contenders take turns. Each worker records when its first optimizer
step has ended; the last worker counts. The programs import everything before `ray.init`, as scripts do.
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import (
    OWN,
    RAY_TRAIN_FAST_POLL,
    Report,
    Target,
    choose_peers,
    dispatch,
    estimate,
    job_began,
    make_parser,
    ray_cluster,
    run_job,
    take_turns,
)
from _workloads import WORKLOADS, HandWritten, StampedOperator, config_of, last_stamp, stamp

PEERS = {"bare": "ray", "ray_train": "ray.train", "ray_train_fast_poll": "ray.train"}
FIRST_STEP = WORKLOADS["mlp_tiny"].with_steps(1)
_FIGURES = {
    "after_init_s": "ray.init's return -> first step, s",
    "ray_init_s": "ray.init itself, s",
    "from_process_start_s": "process start -> first step, s",
}


def _timed(start: Any, num_workers: int, num_cpus: int) -> dict[str, float]:
    """Call `start(folder)` in a new cluster, which makes each rank write a stamp into the folder."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        before_init = time.monotonic()
        with ray_cluster(num_cpus):
            after_init = time.monotonic()
            start(Path(folder))
            first_step = last_stamp(Path(folder), num_workers)
    return {
        "after_init_s": first_step - after_init,
        "ray_init_s": after_init - before_init,
        "from_process_start_s": first_step - job_began(),
    }


def run_raysgd(num_workers: int) -> dict[str, float]:
    """Start a trainer and take one step."""
    import ray  # noqa: F401

    from raysgd import TorchTrainer

    def start(folder: Path) -> None:
        config = config_of(FIRST_STEP, num_workers, stamps=str(folder))
        with TorchTrainer(training_operator_cls=StampedOperator, config=config, num_workers=num_workers) as trainer:
            trainer.train(num_steps=1)

    return _timed(start, num_workers, num_workers)


def run_bare(num_workers: int) -> dict[str, float]:
    """Start plain actors and take one step."""
    from _floor import FloorGroup

    def start(folder: Path) -> None:
        group = FloorGroup(FIRST_STEP, num_workers)
        group.train_epoch(stamps=folder)
        group.stop()

    return _timed(start, num_workers, num_workers)


def run_ray_train(num_workers: int) -> dict[str, float]:
    """Start Ray Train and take one step."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer

    def start(folder: Path) -> None:
        RayTrainer(
            _ray_train_loop,
            train_loop_config={"stamps": str(folder)},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=str(folder), name="startup"),
        ).fit()

    return _timed(start, num_workers, num_workers + 1)


def _ray_train_loop(config: dict[str, Any]) -> None:
    import ray.train

    context = ray.train.get_context()
    rank = context.get_world_rank()
    HandWritten(FIRST_STEP, rank, context.get_world_size()).train_epoch()
    stamp(Path(config["stamps"]), rank)


ROLES = {OWN: run_raysgd, "bare": run_bare, "ray_train": run_ray_train, "ray_train_fast_poll": run_ray_train}
_ENVIRONMENTS = {"ray_train_fast_poll": RAY_TRAIN_FAST_POLL}


def main() -> None:
    dispatch(ROLES)
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=7, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    if arguments.smoke_test:
        arguments.repetitions = 1
    report = Report("startup", arguments, peers)

    jobs = {
        name: functools.partial(
            run_job, __file__, name, environment=_ENVIRONMENTS.get(name), num_workers=arguments.num_workers
        )
        for name in (OWN, *peers.selected)
    }
    runs = take_turns(jobs, arguments.repetitions, report)
    rows, medians = [], {}
    for name, found in runs.items():
        cells = []
        for figure in _FIGURES:
            value = estimate([run[figure] for run in found])
            report.result(name, figure, value, num_workers=arguments.num_workers)
            medians[name, figure] = value.median
            cells.append(value.text())
        rows.append([name, *cells])
    report.table(f"Start of {arguments.num_workers} workers", ["contender", *_FIGURES.values()], rows)
    own, other = medians[OWN, "after_init_s"], medians.get(("ray_train", "after_init_s"))
    report.finish(
        [Target("raysgd / Ray Train, ray.init -> first step", 0.30, True, None if other is None else own / other)]
    )


if __name__ == "__main__":
    main()
