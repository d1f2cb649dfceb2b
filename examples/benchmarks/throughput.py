"""Training speed: raysgd's stock operator against a hand-written loop, and against other libraries.

    python examples/benchmarks/throughput.py [--smoke-test] [--num-workers 2] [--repetitions 40] [--peers raw]

Two measurements:

* **Paired.** Separate processes of the very same program differ by some percent from run to run, which is more
  than what is looked for. So both loops run in the same worker processes: in turn, one epoch by hand and one
  epoch of the operator, with the same batch size, number of steps and initial weights. Each epoch is timed
  inside the workers, from the first instruction of the loop to its last, after a barrier; the slower rank
  counts. Snapshots of the state have left the workers before. `--repetitions` is the number of such pairs.
* **Side by side.** Samples per second over whole epochs, with everything that a library does between them, for
  raysgd the snapshots too: each contender in its own processes, in turn, `--peer-repetitions` times.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import (
    OWN,
    RAY_TRAIN_FAST_POLL,
    Estimate,
    Report,
    Target,
    choose_peers,
    dispatch,
    estimate,
    in_pairs,
    make_parser,
    ray_cluster,
    run_job,
    significant,
    take_turns,
)
from _workloads import (
    WORKLOADS,
    HandWritten,
    StockOperator,
    TimedOperator,
    Workload,
    await_snapshot,
    config_of,
    meet,
    sgd,
    step_s,
    workload_of,
)

from raysgd import TorchTrainer, TrainingOperator

PEERS = {
    "raw": "torch",
    "bare": "ray",
    "ray_train": "ray.train",
    "ray_train_fast_poll": "ray.train",
    "lightning": "lightning",
    "accelerate": "accelerate",
}
NUM_WARM_UP_PAIRS = 3
SMOKE_STEPS = 4
SMOKE_WORKLOADS = ("mlp_tiny",)

# ------------------------------------------------------------------------------------------------------ paired


class PairedOperator(TimedOperator):
    """Trains one model with the stock loop, and a copy with the hand-written loop."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        model = self.model.module if config["world_size"] > 1 else self.model
        self.by_hand = HandWritten(workload_of(config), self.world_rank, config["world_size"], model)

    def before_loop(self) -> None:
        meet()


def train_by_hand(operator: TrainingOperator) -> float:
    """Train one epoch with the hand-written loop; return its seconds."""
    assert isinstance(operator, PairedOperator)
    return operator.by_hand.timed_epoch()


@dataclass(frozen=True)
class Pair:
    """The seconds of a step, by hand and by the operator, measured right after one another."""

    by_hand_s: float
    operator_s: float


def measure_pairs(workload: Workload, num_workers: int, num_pairs: int) -> list[Pair]:
    """Train epochs of both kinds in turn, in one group of workers; which one goes first alternates."""
    config = config_of(workload, num_workers)
    with TorchTrainer(training_operator_cls=PairedOperator, config=config, num_workers=num_workers) as trainer:

        def by_hand() -> float:
            await_snapshot(trainer)
            return max(trainer.apply_all_operators(train_by_hand)) / workload.num_steps

        by_operator = functools.partial(step_s, trainer)
        pairs = in_pairs(by_hand, by_operator, num_pairs=num_pairs, num_warm_up=NUM_WARM_UP_PAIRS)
    return [Pair(*pair) for pair in pairs]


# ------------------------------------------------------------------------------------------------------ side by side


class Stopwatch:
    """Samples per second from the end of the first epoch to the end of the last.

    Args:
        workload: Workload to train.
        world_size: Number of workers.
    """

    def __init__(self, workload: Workload, world_size: int) -> None:
        self._num_samples = workload.num_samples(world_size)
        self._ends: list[float] = []

    def epoch_ended(self) -> None:
        """Call after each epoch."""
        self._ends.append(time.perf_counter())

    @property
    def samples_per_s(self) -> float:
        return self._num_samples * (len(self._ends) - 1) / (self._ends[-1] - self._ends[0])


Job = list[list[Any]]  # name and number of steps of each workload, as in JSON


def _workloads(job: Job) -> list[Workload]:
    return [WORKLOADS[name].with_steps(num_steps) for name, num_steps in job]


def run_raysgd(job: Job, num_workers: int, num_epochs: int) -> dict[str, float]:
    """Run `TorchTrainer.train` as a user would, including its snapshots of the state."""
    speeds = {}
    with ray_cluster(num_workers):
        for workload in _workloads(job):
            watch = Stopwatch(workload, num_workers)
            config = config_of(workload, num_workers)
            with TorchTrainer(training_operator_cls=StockOperator, config=config, num_workers=num_workers) as trainer:
                for _ in range(num_epochs):
                    trainer.train()
                    watch.epoch_ended()
            speeds[workload.name] = watch.samples_per_s
    return speeds


def run_raw(job: Job, num_workers: int, num_epochs: int) -> dict[str, float]:
    """Run the hand-written loop under torchrun."""
    dist.init_process_group("gloo")
    speeds = {}
    for workload in _workloads(job):
        watch, training = Stopwatch(workload, num_workers), HandWritten(workload, dist.get_rank(), num_workers)
        for _ in range(num_epochs):
            training.train_epoch_of_all()
            watch.epoch_ended()
        speeds[workload.name] = watch.samples_per_s
    dist.destroy_process_group()
    return speeds


def run_bare(job: Job, num_workers: int, num_epochs: int) -> dict[str, float]:
    """The loop written by hand on bare Ray actors, with one call for each epoch."""
    from _floor import FloorGroup

    speeds = {}
    with ray_cluster(num_workers):
        for workload in _workloads(job):
            watch, group = Stopwatch(workload, num_workers), FloorGroup(workload, num_workers)
            for _ in range(num_epochs):
                group.train_epoch()
                watch.epoch_ended()
            group.stop()
            speeds[workload.name] = watch.samples_per_s
    return speeds


def run_ray_train(job: Job, num_workers: int, num_epochs: int) -> dict[str, float]:
    """Run Ray Train with the hand-written loop, its preparation of model and loader, and a report for each epoch."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(num_workers + 1):
        output = Path(folder) / "speeds.json"
        trainer = RayTrainer(
            _ray_train_loop,
            train_loop_config={"job": job, "num_epochs": num_epochs, "output": str(output)},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=folder, name="throughput"),
        )
        trainer.fit()
        return dict(json.loads(output.read_text()))


def _ray_train_loop(config: dict[str, Any]) -> None:
    import ray.train
    from ray.train.torch import prepare_data_loader, prepare_model

    context = ray.train.get_context()
    speeds = {}
    for workload in _workloads(config["job"]):
        world_size = context.get_world_size()
        watch = Stopwatch(workload, world_size)
        model = prepare_model(workload.model())
        optimizer = sgd(model)
        loader = prepare_data_loader(_plain_loader(workload, world_size))
        for epoch in range(config["num_epochs"]):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            ray.train.report({"loss": _plain_epoch(model, optimizer, loader, lambda loss: loss.backward())})
            watch.epoch_ended()
        speeds[workload.name] = watch.samples_per_s
    if context.get_world_rank() == 0:
        Path(config["output"]).write_text(json.dumps(speeds))


def run_accelerate(job: Job, num_workers: int, num_epochs: int) -> dict[str, float]:
    """Run accelerate under torchrun, with the loop from its documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    speeds = {}
    for workload in _workloads(job):
        watch, model = Stopwatch(workload, num_workers), workload.model()
        model, optimizer, loader = accelerator.prepare(model, sgd(model), _plain_loader(workload, num_workers))
        for _ in range(num_epochs):
            _plain_epoch(model, optimizer, loader, accelerator.backward)
            watch.epoch_ended()
        speeds[workload.name] = watch.samples_per_s
    return speeds


def _plain_loader(workload: Workload, world_size: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(workload.dataset(world_size), batch_size=workload.batch_size, shuffle=True)


def _plain_epoch(model: Any, optimizer: Any, loader: Any, backward: Callable[[torch.Tensor], Any]) -> float:
    """Train one epoch with a prepared model and loader; return the mean loss of all ranks."""
    criterion = torch.nn.CrossEntropyLoss()
    model.train()
    totals = torch.zeros(2)
    for features, target in loader:
        loss = criterion(model(features), target)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        totals[0] += loss.detach() * len(target)
        totals[1] += len(target)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def run_lightning(job: Job, num_workers: int, num_epochs: int) -> dict[str, float]:
    """Run Lightning's Trainer under torchrun, with all output to people and files switched off."""
    import warnings

    import lightning

    warnings.filterwarnings("ignore")

    class Module(lightning.LightningModule):
        def __init__(self, workload: Workload) -> None:
            super().__init__()
            self.model, self.criterion = workload.model(), torch.nn.CrossEntropyLoss()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features, target = batch
            loss = self.criterion(self.model(features), target)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

    class Watcher(lightning.Callback):
        def __init__(self, watch: Stopwatch) -> None:
            self._watch = watch

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self._watch.epoch_ended()

    speeds = {}
    for workload in _workloads(job):
        watch = Stopwatch(workload, num_workers)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=num_workers,
            strategy="ddp",
            max_epochs=num_epochs,
            callbacks=[Watcher(watch)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(workload), _plain_loader(workload, num_workers))
        speeds[workload.name] = watch.samples_per_s
    return speeds


ROLES = {
    OWN: run_raysgd,
    "raw": run_raw,
    "bare": run_bare,
    "ray_train": run_ray_train,
    "ray_train_fast_poll": run_ray_train,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
}
_UNDER_TORCHRUN = ("raw", "accelerate", "lightning")
_ENVIRONMENTS = {"ray_train_fast_poll": RAY_TRAIN_FAST_POLL}


def measure_speeds(
    contenders: Sequence[str], workloads: Sequence[Workload], arguments: argparse.Namespace, report: Report
) -> dict[str, dict[str, Estimate]]:
    """Return the samples per second by contender and workload."""
    run = functools.partial(
        run_job,
        __file__,
        job=[[workload.name, workload.num_steps] for workload in workloads],
        num_workers=arguments.num_workers,
        num_epochs=arguments.num_epochs,
    )
    jobs = {
        name: functools.partial(
            run,
            name,
            processes=arguments.num_workers if name in _UNDER_TORCHRUN else None,
            environment=_ENVIRONMENTS.get(name),
        )
        for name in contenders
    }
    found = take_turns(jobs, arguments.peer_repetitions, report)
    return {
        name: {workload.name: estimate([speeds[workload.name] for speeds in runs]) for workload in workloads}
        for name, runs in found.items()
    }


# ------------------------------------------------------------------------------------------------------ the whole


def report_pairs(report: Report, workload: Workload, pairs: Sequence[Pair]) -> tuple[list[str], float, float]:
    """Record the figures of one workload; return a table row, the relative speed, and the additional microseconds."""
    speed = estimate([pair.by_hand_s / pair.operator_s for pair in pairs])
    added_us = estimate([(pair.operator_s - pair.by_hand_s) * 1e6 for pair in pairs])
    step_us = statistics.median(pair.by_hand_s for pair in pairs) * 1e6
    report.result(OWN, "paired_relative_speed", speed, workload=workload.name)
    report.result(OWN, "added_us_per_step", added_us, workload=workload.name)
    report.result("by_hand", "step_us", step_us, workload=workload.name)
    row = [workload.name, str(len(pairs)), significant(step_us), speed.text(4), added_us.text()]
    return row, speed.median, added_us.median


def report_speeds(report: Report, workloads: Sequence[Workload], speeds: dict[str, dict[str, Estimate]]) -> None:
    """Record and print samples per second, with raysgd's advantage over each peer."""
    own = speeds[OWN]
    rows = []
    for name, by_workload in speeds.items():
        cells = []
        for workload in workloads:
            value = by_workload[workload.name]
            report.result(name, "samples_per_s", value, workload=workload.name)
            cells.append(f"{value.text()} ({own[workload.name].median / value.median:.2f}x)")
        rows.append([name, *cells])
    headers = ["contender", *(workload.name for workload in workloads)]
    report.table("Samples per second with everything between epochs (in brackets: raysgd over it)", headers, rows)


def targets_of(speeds: dict[str, float], added_us: dict[str, float]) -> list[Target]:
    """Return the targets: no cost if the arithmetic dominates, and little cost otherwise."""
    return [
        *(
            Target(f"{name}: by hand / raysgd, step time", 0.99, False, speeds.get(name))
            for name in ("mlp_large", "cnn_large")
        ),
        Target("mlp_tiny: added to a step, us", 50.0, True, added_us.get("mlp_tiny")),
    ]


def main() -> None:
    dispatch(ROLES)
    parser = make_parser(__doc__.partition("\n")[0], repetitions=40, peers=PEERS)
    parser.add_argument("--peer-repetitions", type=int, default=3, help="runs of each contender side by side; 0: none")
    parser.add_argument("--num-epochs", type=int, default=6, help="epochs of each such run; the first is not counted")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which models")
    parser.add_argument("--num-steps", type=int, help="steps of an epoch; default: as many as the workload says")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    workloads = [WORKLOADS[name] for name in arguments.workloads.split(",")]
    if arguments.num_steps:
        workloads = [workload.with_steps(arguments.num_steps) for workload in workloads]
    if arguments.smoke_test:
        workloads = [WORKLOADS[name].with_steps(SMOKE_STEPS) for name in SMOKE_WORKLOADS]
        arguments.repetitions, arguments.peer_repetitions, arguments.num_epochs = 2, 1, 2
    report = Report("throughput", arguments, peers)

    rows, relative, added = [], {}, {}
    with ray_cluster(arguments.num_workers):
        for workload in workloads:
            pairs = measure_pairs(workload, arguments.num_workers, arguments.repetitions)
            row, relative[workload.name], added[workload.name] = report_pairs(report, workload, pairs)
            rows.append(row)
    headers = ["model", "pairs", "step by hand, us", "relative speed of raysgd", "added to a step, us"]
    report.table("Paired, in the same processes", headers, rows)

    if peers.selected and arguments.peer_repetitions:
        speeds = measure_speeds([OWN, *peers.selected], workloads, arguments, report)
        report_speeds(report, workloads, speeds)
    report.finish(targets_of(relative, added))


if __name__ == "__main__":
    main()
