"""What one call of `train()` costs when there is next to nothing to train: epochs of a single tiny batch.

    python examples/benchmarks/epoch_cost.py [--smoke-test] [--num-workers 2] [--repetitions 3] [--peers raw,bare]

An epoch is one step of `mlp_tiny` on each worker, so the time of a call is nearly all Python, Ray and network.
The same is measured for bare Ray actors (the floor, see `_floor.py`), for the loop written by hand under
torchrun, and for Ray Train with its controller's poll as it is and at 0.1 s. Growth: the same with more workers,
far more than there are cores, against the loop written by hand.

A sample is the median of the epochs of one run, and there are `--repetitions` runs of each contender, in turn.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

PEERS = {"bare": "ray", "raw": "torch", "ray_train_fast_poll": "ray.train", "ray_train": "ray.train"}
NUM_EPOCHS = {OWN: 100, "bare": 100, "raw": 100, "ray_train_fast_poll": 20, "ray_train": 5}
SMOKE_NUM_EPOCHS = {**dict.fromkeys(NUM_EPOCHS, 5), "ray_train": 2}
NUM_EPOCHS_OF_GROWTH = 30
NUM_WARM_UP_EPOCHS = 5
EPOCH = WORKLOADS["mlp_tiny"].with_steps(1)


def _durations(call: Callable[[], Any], num_calls: int) -> list[float]:
    """Seconds of each of `num_calls` calls, after some that do not count."""
    durations = []
    for _ in range(NUM_WARM_UP_EPOCHS + num_calls):
        began = time.perf_counter()
        call()
        durations.append(time.perf_counter() - began)
    return durations[NUM_WARM_UP_EPOCHS:]


def run_raysgd(num_workers: int, num_epochs: int) -> dict[str, float]:
    """`TorchTrainer.train`, seen from the driver, and how much of it the operator's loop took."""
    loops: list[float] = []
    with ray_cluster(num_workers):
        config = config_of(EPOCH, num_workers)
        with TorchTrainer(training_operator_cls=TimedOperator, config=config, num_workers=num_workers) as trainer:
            durations = _durations(lambda: loops.append(trainer.train()["loop_s"]), num_epochs)
    return {"epoch_s": statistics.median(durations), "loop_s": statistics.median(loops[NUM_WARM_UP_EPOCHS:])}


def run_bare(num_workers: int, num_epochs: int) -> dict[str, float]:
    """One call of every actor and one `ray.get`, seen from the driver."""
    from _floor import FloorGroup

    with ray_cluster(num_workers):
        group = FloorGroup(EPOCH, num_workers)
        durations = _durations(group.train_epoch, num_epochs)
        group.stop()
    return {"epoch_s": statistics.median(durations)}


def run_raw(num_workers: int, num_epochs: int) -> dict[str, float]:
    """The loop written by hand, seen from rank 0."""
    dist.init_process_group("gloo")
    training = HandWritten(EPOCH, dist.get_rank(), num_workers)
    durations = _durations(training.train_epoch_of_all, num_epochs)
    dist.destroy_process_group()
    return {"epoch_s": statistics.median(durations)}


def run_ray_train(num_workers: int, num_epochs: int) -> dict[str, float]:
    """The same in Ray Train, with one report for each epoch, seen from rank 0."""
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
}
_ENVIRONMENTS = {"ray_train_fast_poll": RAY_TRAIN_FAST_POLL}


def measure(
    num_epochs: Mapping[str, int], num_workers: int, num_repetitions: int, report: Report
) -> dict[str, dict[str, Estimate]]:
    """Milliseconds by contender and figure; `num_epochs` has the contenders, and how many epochs each trains."""
    jobs = {
        name: functools.partial(
            run_job,
            __file__,
            name,
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
    """Notes and prints what an epoch costs with each contender."""
    own = found[OWN]["epoch_s"].median
    rows = []
    for name, figures in found.items():
        report.result(name, "epoch_ms", figures["epoch_s"], num_workers=num_workers)
        rows.append([name, figures["epoch_s"].text(), f"{own / figures['epoch_s'].median:.3g}x"])
    loop = found[OWN]["loop_s"]
    report.result(OWN, "loop_ms", loop, num_workers=num_workers)
    report.table(f"An epoch of one batch, {num_workers} workers", ["contender", "ms", "raysgd over it"], rows)
    print(f"\nOf raysgd's time the loop in the workers took {loop.text()} ms.", flush=True)


def report_growth(report: Report, by_size: dict[int, dict[str, dict[str, Estimate]]]) -> dict[int, float]:
    """Notes and prints what an epoch costs with more workers; returns raysgd over the loop by hand, where measured."""
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

    growing = {name: NUM_EPOCHS_OF_GROWTH for name in counts if name in (OWN, "raw")}
    by_size = {size: measure(growing, size, arguments.repetitions, report) for size in sizes}
    ratios = report_growth(report, by_size) if by_size else {}
    call_ms = found[OWN]["epoch_s"].median
    report.finish(
        [
            Target(f"{arguments.num_workers} workers: one call of `train`, ms", 4.0, True, call_ms),
            Target("16 workers: raysgd / by hand, time of an epoch", 1.25, True, ratios.get(16)),
        ]
    )


if __name__ == "__main__":
    main()
