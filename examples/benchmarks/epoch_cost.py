"""The overhead of an epoch beyond its steps: epochs of a single tiny batch, and the edges of epochs of ten batches.

    python examples/benchmarks/epoch_cost.py [--smoke-test] [--num-workers 2] [--repetitions 3] [--peers raw,bare]

An epoch of one step of `mlp_tiny` on each worker is nearly all Python, Ray and network. It lasts from the return of
one call to the return of the next, here from one result that a callback of `fit` gets to the next. The same is
measured for plain Ray actors (the floor, see `_floor.py`), for the hand-written loop under torchrun, and for Ray
Train with its controller's default poll and at 0.1 s. Growth: the same with more workers, far more than there are
cores, against the hand-written loop.

Edges: in epochs of ten steps of `cnn_large`, the time between the last step of an epoch and the first step of the
next, minus the time between two steps inside an epoch, on rank 0.

A sample is the median of the epochs of one run, and there are `--repetitions` runs of each contender, in turn.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
    make_parser,
    ray_cluster,
    run_job,
    scaled,
    take_turns,
)
from _workloads import WORKLOADS, HandWritten, TimedOperator, config_of, sgd

from raysgd import TorchTrainer
from raysgd.callbacks import Callback, Run

PEERS = {"bare": "ray", "raw": "torch", "ray_train_fast_poll": "ray.train", "ray_train": "ray.train"}
NUM_EPOCHS = {OWN: 100, "bare": 100, "raw": 100, "ray_train_fast_poll": 20, "ray_train": 5}
SMOKE_NUM_EPOCHS = {**dict.fromkeys(NUM_EPOCHS, 5), "ray_train": 2}
NUM_EPOCHS_OF_GROWTH = 30
NUM_WARM_UP_EPOCHS = 5
EPOCH = WORKLOADS["mlp_tiny"].with_steps(1)
LONG_EPOCH = WORKLOADS["cnn_large"]
NUM_LONG_EPOCHS = {OWN: 30, "raw": 30}
SMOKE_NUM_LONG_EPOCHS = {OWN: 2, "raw": 2}


class Ends(Callback):
    """Records when each epoch of a `fit` ended, and how long its loop took."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.loops: list[float] = []

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.at.append(time.perf_counter())
        self.loops.append(result["loop_s"])


class StampedOperator(TimedOperator):
    """Also records when each of its steps ended."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.step_ends = step_ends_of(self.optimizer)


def step_ends_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return a list to which the time of each later step is added."""
    ends: list[float] = []
    optimizer.register_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    return ends


def edges_s(step_ends: Sequence[float], num_steps: int) -> float:
    """Return how much longer the first step of an epoch takes, from the step before it: the median of the epochs."""
    gaps = [end - begin for begin, end in itertools.pairwise(step_ends[num_steps - 1 :])]
    inside = [gap for index, gap in enumerate(gaps) if index % num_steps]
    return statistics.median(gaps[::num_steps]) - statistics.median(inside)


def _between(ends: Sequence[float]) -> float:
    """Return the seconds from one end to the next: the median of all that count."""
    return statistics.median(end - begin for begin, end in itertools.pairwise(ends[NUM_WARM_UP_EPOCHS:]))


def _ends(call: Callable[[], Any], num_calls: int) -> list[float]:
    """Return when each of `num_calls` calls returned, after some calls that do not count."""
    ends = []
    for _ in range(NUM_WARM_UP_EPOCHS + num_calls + 1):
        call()
        ends.append(time.perf_counter())
    return ends


def run_raysgd(num_workers: int, num_epochs: int) -> dict[str, float]:
    """Run epochs of `TorchTrainer.fit`, seen from the driver, and return how much time the operator's loop took."""
    ends = Ends()
    with ray_cluster(num_workers):
        config = config_of(EPOCH, num_workers)
        with TorchTrainer(training_operator_cls=TimedOperator, config=config, num_workers=num_workers) as trainer:
            trainer.fit(NUM_WARM_UP_EPOCHS + num_epochs + 1, callbacks=[ends])
    return {"epoch_s": _between(ends.at), "loop_s": statistics.median(ends.loops[NUM_WARM_UP_EPOCHS:])}


def run_bare(num_workers: int, num_epochs: int) -> dict[str, float]:
    """Make one call of every actor and one `ray.get`, seen from the driver."""
    from _floor import FloorGroup

    with ray_cluster(num_workers):
        group = FloorGroup(EPOCH, num_workers)
        ends = _ends(group.train_epoch, num_epochs)
        group.stop()
    return {"epoch_s": _between(ends)}


def run_raw(num_workers: int, num_epochs: int) -> dict[str, float]:
    """Run the hand-written loop, seen from rank 0."""
    dist.init_process_group("gloo")
    training = HandWritten(EPOCH, dist.get_rank(), num_workers)
    return {"epoch_s": _between(_ends(training.train_epoch_of_all, num_epochs))}


def run_raysgd_long(num_workers: int, num_epochs: int) -> dict[str, float]:
    """Measure the edges of longer epochs of `fit`."""
    with ray_cluster(num_workers):
        config = config_of(LONG_EPOCH, num_workers)
        with TorchTrainer(training_operator_cls=StampedOperator, config=config, num_workers=num_workers) as trainer:
            trainer.fit(num_epochs, callbacks=[Ends()])
            step_ends, *_ = trainer.apply_all_operators(lambda operator: operator.step_ends)
    return {"edges_s": edges_s(step_ends, LONG_EPOCH.num_steps)}


def run_raw_long(num_workers: int, num_epochs: int) -> dict[str, float]:
    """Measure the edges of the hand-written loop."""
    dist.init_process_group("gloo")
    training = HandWritten(LONG_EPOCH, dist.get_rank(), num_workers)
    step_ends = step_ends_of(training.optimizer)
    for _ in range(num_epochs):
        training.train_epoch_of_all()
    return {"edges_s": edges_s(step_ends, LONG_EPOCH.num_steps)}


def run_ray_train(num_workers: int, num_epochs: int) -> dict[str, float]:
    """Measure the edges in Ray Train, with one report for each epoch, seen from rank 0."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer as RayTrainer

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ray_cluster(num_workers + 1):
        output = Path(folder) / "ends.json"
        RayTrainer(
            _ray_train_loop,
            train_loop_config={"num_epochs": num_epochs + 1, "output": str(output)},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=folder, name="epoch_cost"),
        ).fit()
        ends = json.loads(output.read_text())
    return {"epoch_s": statistics.median(end - begin for begin, end in itertools.pairwise(ends))}


def _ray_train_loop(config: dict[str, Any]) -> None:
    import ray.train
    from ray.train.torch import prepare_data_loader, prepare_model
    from torch.nn import CrossEntropyLoss
    from torch.utils.data import DataLoader

    context = ray.train.get_context()
    model = prepare_model(EPOCH.model())
    optimizer, criterion = sgd(model), CrossEntropyLoss()
    dataset = EPOCH.dataset(context.get_world_size())
    loader = prepare_data_loader(DataLoader(dataset, batch_size=EPOCH.batch_size, shuffle=True))
    ends = []
    for _ in range(config["num_epochs"]):
        for features, target in loader:
            loss = criterion(model(features), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})
        ends.append(time.perf_counter())
    if context.get_world_rank() == 0:
        Path(config["output"]).write_text(json.dumps(ends))


ROLES = {
    OWN: run_raysgd,
    "bare": run_bare,
    "raw": run_raw,
    "ray_train": run_ray_train,
    "ray_train_fast_poll": run_ray_train,
    f"{OWN}_long": run_raysgd_long,
    "raw_long": run_raw_long,
}
_ENVIRONMENTS = {"ray_train_fast_poll": RAY_TRAIN_FAST_POLL}


def measure(
    num_epochs: Mapping[str, int], num_workers: int, num_repetitions: int, report: Report, role: str = ""
) -> dict[str, dict[str, Estimate]]:
    """Return the milliseconds by contender and figure; `num_epochs` has the contenders and their number of epochs."""
    jobs = {
        name: functools.partial(
            run_job,
            __file__,
            name + role,
            processes=num_workers if name == "raw" else None,
            environment=_ENVIRONMENTS.get(name),
            num_workers=num_workers,
            num_epochs=count,
        )
        for name, count in num_epochs.items()
    }
    return {
        name: {figure: estimate(scaled([run[figure] for run in runs], 1e3)) for figure in runs[0]}
        for name, runs in take_turns(jobs, num_repetitions, report).items()
    }


def report_cost(report: Report, num_workers: int, found: dict[str, dict[str, Estimate]]) -> None:
    """Record and print the cost of an epoch for each contender."""
    own = found[OWN]["epoch_s"].median
    rows = []
    for name, figures in found.items():
        report.result(name, "epoch_ms", figures["epoch_s"], num_workers=num_workers)
        rows.append([name, figures["epoch_s"].text(), f"{own / figures['epoch_s'].median:.3g}x"])
    loop = found[OWN]["loop_s"]
    report.result(OWN, "loop_ms", loop, num_workers=num_workers)
    report.table(f"An epoch of one batch, {num_workers} workers", ["contender", "ms", "raysgd over it"], rows)
    print(f"\nOf raysgd's time the loop in the workers took {loop.text()} ms.", flush=True)


def report_edges(report: Report, num_workers: int, found: dict[str, dict[str, Estimate]]) -> float | None:
    """Record and print the cost of the edges of longer epochs; return the excess over the loop by hand, if measured."""
    for name, figures in found.items():
        report.result(name, "edges_ms", figures["edges_s"], num_workers=num_workers)
    rows = [[name, figures["edges_s"].text()] for name, figures in found.items()]
    title = f"Edges of an epoch of {LONG_EPOCH.num_steps} steps of `{LONG_EPOCH.name}`, {num_workers} workers"
    report.table(title, ["contender", "ms"], rows)
    return found[OWN]["edges_s"].median - found["raw"]["edges_s"].median if "raw" in found else None


def report_growth(report: Report, by_size: dict[int, dict[str, dict[str, Estimate]]]) -> dict[int, float]:
    """Record and print the cost of an epoch with more workers; return the ratio to the loop by hand, if measured."""
    rows, ratios = [], {}
    for size, found in by_size.items():
        cells = []
        for name in (OWN, "raw"):
            if name in found:
                report.result(name, "epoch_ms", found[name]["epoch_s"], num_workers=size)
            cells.append(found[name]["epoch_s"].text() if name in found else "-")
        if "raw" in found:
            ratios[size] = found[OWN]["epoch_s"].median / found["raw"]["epoch_s"].median
        rows.append([str(size), *cells, f"{ratios[size]:.2f}x" if size in ratios else "-"])
    report.table("Growth: ms of an epoch of one batch", ["workers", "raysgd", "by hand", "raysgd over it"], rows)
    return ratios


def main() -> None:
    dispatch(ROLES)
    parser = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS)
    parser.add_argument("--sizes", default="4,8,16", help="numbers of workers for the growth")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    sizes = [int(size) for size in arguments.sizes.split(",") if size]
    if arguments.smoke_test:
        arguments.repetitions, sizes = 1, []
    report = Report("epoch_cost", arguments, peers)

    counts = SMOKE_NUM_EPOCHS if arguments.smoke_test else NUM_EPOCHS
    counts = {name: counts[name] for name in (OWN, *peers.selected)}
    found = measure(counts, arguments.num_workers, arguments.repetitions, report)
    report_cost(report, arguments.num_workers, found)
    own = found[OWN]["epoch_s"].median
    over = {name: own / figures["epoch_s"].median for name, figures in found.items()}

    long_counts = SMOKE_NUM_LONG_EPOCHS if arguments.smoke_test else NUM_LONG_EPOCHS
    long_counts = {name: count for name, count in long_counts.items() if name in counts}
    long = measure(long_counts, arguments.num_workers, arguments.repetitions, report, "_long")
    more_ms = report_edges(report, arguments.num_workers, long)

    growing = {name: NUM_EPOCHS_OF_GROWTH for name in counts if name in (OWN, "raw")}
    by_size = {size: measure(growing, size, arguments.repetitions, report) for size in sizes}
    ratios = report_growth(report, by_size) if by_size else {}
    workers = f"{arguments.num_workers} workers"
    report.finish(
        [
            Target(f"{workers}: raysgd / by hand, time of an epoch of one step", 1.5, True, over.get("raw")),
            Target(f"{workers}: raysgd / bare actors, time of an epoch of one step", 1.1, True, over.get("bare")),
            Target(f"{workers}: edges of an epoch of ten steps, ms more than by hand", 5.0, True, more_ms),
            Target("16 workers: raysgd / by hand, time of an epoch", 1.25, True, ratios.get(16)),
        ]
    )


if __name__ == "__main__":
    main()
