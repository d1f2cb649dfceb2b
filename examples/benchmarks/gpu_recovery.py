"""Recovery over NCCL: from the SIGKILL of a worker to the end of the next step of the others, and where the time goes.

    python examples/benchmarks/gpu_recovery.py [--smoke-test] [--repetitions 3] [--sizes 2,4,8]

It needs NVIDIA GPUs; otherwise it says so and ends. With fewer GPUs than workers, it needs NCCL 2.30 or later with
`NCCL_MULTI_RANK_GPU_ENABLE=1`, so that several ranks run on one GPU. They take turns there, so these figures are no
figures of several GPUs, and the report says how many ranks shared a GPU. `--smoke-test` runs on the CPU over gloo, only
to check that it runs.

The victim writes down when it dies, and every worker when each of its steps has ended on the device. The time between
is split into: notice (until the driver knows), new group (until the others have left the broken group, which includes
`ncclCommAbort`, and formed a new one), and first step. The abort is measured in the workers.

With two workers, the stock loop is also compared with a loop by hand under `DistributedDataParallel`, which does not
wait for its sums (ADR 175). Both train in the same processes, on the same batches, in turn. A copy of the state for the
driver stops rank 0 after each call of the stock loop, and is measured apart. The memory of a communicator, and
`shrink_group` beside a new group, are in part 1 of `tests/gpu`. torchft, which waits for its sums, too, runs beside if
`.venv-torchft` has it.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _common import (
    OWN,
    JobError,
    Report,
    Target,
    choose_peers,
    estimate,
    in_pairs,
    make_parser,
    ray_cluster,
    take_turns,
)
from _torchft import PYTHON as TORCHFT
from _torchft import ReplicaGroup, run_groups
from _workloads import copies_made, watch_copies
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Recovery, TorchTrainer, TrainingOperator

PEERS = {"torchft": str(TORCHFT), "torchft_tuned": str(TORCHFT)}
FIGURES = {
    "recovery_s": "kill -> end of the next step, s",
    "notice_s": "notice, s",
    "new_group_s": "new group, s",
    "first_step_s": "first step, s",
    "abort_s": "of which abort, s",
    "step_s": "a step before, s",
}
SPEED = {
    "by_hand_ms": "a step by hand, ms",
    "stock_ms": "a step of the stock loop, ms",
    "relative_speed": "speed of the stock loop, relative",
    "copy_ms": "a copy of the state after a call, ms",
}
BATCH_SIZE, VICTIM, KILLED_AFTER, NUM_STEPS = 64, 1, 20, 40
NEEDS = (
    "gpu_recovery needs an NVIDIA GPU and a PyTorch that sees it (`torch.cuda.is_available()` is False here), so it "
    "measured nothing. Run it on a machine with one, or pass `--smoke-test` to see that it runs, on the CPU."
)


class Perceptron(TrainingOperator):
    """Three layers."""

    def setup(self, config: dict[str, Any]) -> None:
        model = perceptron(config["width"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.CrossEntropyLoss()
        )
        self.register_data(train_loader=self.make_loader())

    def make_loader(self) -> Any:
        return DataLoader(samples(), batch_size=BATCH_SIZE)


def perceptron(width: int) -> nn.Module:
    """Return the model of all loops."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def samples() -> TensorDataset:
    """Return random samples for an epoch."""
    num_samples = BATCH_SIZE * NUM_STEPS
    return TensorDataset(torch.randn(num_samples, 64), torch.randint(10, (num_samples,)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def now() -> float:
    """Wait until the GPU has completed its work, and return the time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time()


class Stamped(Perceptron):
    """Writes down when its steps have ended on the device, and when it dies."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        folder = Path(self.config["folder"])
        die_if_due(folder, self.world_rank, self.global_step)
        result = super().train_batch(batch, batch_info)
        stamp(folder)
        return result


def die_if_due(folder: Path, rank: int, num_steps: int) -> None:
    """End this process, once, if its time has come."""
    if rank == VICTIM and num_steps == NUM_STEPS + KILLED_AFTER and not (folder / "died").exists():
        (folder / "died").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def stamp(folder: Path) -> None:
    """Write down when a step has ended."""
    with (folder / f"steps-{os.getpid()}").open("a") as file:
        file.write(f"{now()!r}\n")


def read_stamps(folder: Path, since: float | None = None) -> dict[str, float]:
    """Return when the victim died, when the next step ended, at the earliest `since`, and the seconds of a step."""
    died = float((folder / "died").read_text())
    stamps = [sorted(map(float, path.read_text().split())) for path in folder.glob("steps-*")]
    ends = min(end for each in stamps for end in each if end > (since or died))
    before = [later - earlier for each in stamps for earlier, later in pairwise(each) if later < died]
    return {"died": died, "ends": ends, "step_s": sorted(before)[len(before) // 2]}


class Batches:
    """One batch again and again, in pinned memory if there is a GPU, with a clock for the loop that takes it."""

    def __init__(self, pins: bool) -> None:
        batch = torch.randn(BATCH_SIZE, 64), torch.randint(10, (BATCH_SIZE,))
        self._batch = tuple(each.pin_memory() if pins else each for each in batch)
        self.step_s = 0.0

    def __len__(self) -> int:
        return NUM_STEPS

    def __iter__(self) -> Iterator[Any]:
        began = now()
        for _ in range(NUM_STEPS):
            yield self._batch
        self.step_s = (now() - began) / NUM_STEPS


class Timed(Perceptron):
    """Trains on batches with a clock."""

    def make_loader(self) -> Any:
        self.batches = Batches(self.use_gpu)
        return self.batches


def step_s(operator: Timed) -> float:
    """Return the seconds of a step in the latest epoch."""
    return operator.batches.step_s


def train_by_hand(operator: Timed) -> float:
    """Train an epoch by hand, on a copy of the model, and return the seconds of a step."""
    if not hasattr(operator, "by_hand"):
        ids = [operator.device.index] if operator.use_gpu else None
        operator.by_hand = DistributedDataParallel(copy.deepcopy(operator.model.module), device_ids=ids)
        operator.by_hand_optimizer = sgd(operator.by_hand)
    for batch in operator.batches:
        features, target = (each.to(operator.device, non_blocking=True) for each in batch)
        operator.by_hand_optimizer.zero_grad()
        operator.criterion(operator.by_hand(features), target).backward()
        operator.by_hand_optimizer.step()
    return step_s(operator)


def time_aborts(folder: str) -> None:
    """In a worker, write down how long `ncclCommAbort` takes."""
    from raysgd.core.connections import torch as connections

    abort: Callable[[], None] = connections._abort_process_group

    def timed() -> None:
        began = time.time()
        abort()
        Path(folder, f"abort-{os.getpid()}").write_text(repr(time.time() - began))

    connections._abort_process_group = timed


def options_for(num_workers: int, width: int, smoke_test: bool) -> dict[str, Any]:
    """Return the arguments of the trainer; workers share GPUs if there are too few."""
    num_gpus = 0 if smoke_test else torch.cuda.device_count()
    options: dict[str, Any] = {"num_workers": num_workers, "num_cpus_per_worker": 0.5}
    options |= {"use_gpu": bool(num_gpus), "backend": "nccl" if num_gpus else "gloo"}
    options["config"] = {"width": 64 if smoke_test else width}
    if num_gpus:
        num_on_a_gpu = -(-num_workers // num_gpus)
        options["num_gpus_per_worker"] = 1 if num_on_a_gpu == 1 else 10_000 // num_on_a_gpu / 10_000
    return options


def compare(width: int, num_pairs: int, smoke_test: bool) -> list[dict[str, float]]:
    """Train epochs by hand and with the stock loop, in turn, on two workers, and return the figures of each pair."""
    options = options_for(2, width, smoke_test)
    with TorchTrainer(training_operator_cls=Timed, recovery=Recovery(snapshot_every_s=0), **options) as trainer:
        trainer.apply_all_workers(watch_copies)

        def stock() -> float:
            trainer.train()
            return trainer.apply_all_operators(step_s)[0]

        pairs = in_pairs(
            lambda: trainer.apply_all_operators(train_by_hand)[0], stock, num_pairs=num_pairs, num_warm_up=2
        )
        copies = trainer.apply_all_workers(copies_made)[0][-num_pairs:]
    return [
        {"by_hand_ms": 1e3 * hand, "stock_ms": 1e3 * own, "relative_speed": hand / own, "copy_ms": 1e3 * copy_s}
        for (hand, own), (_, copy_s) in zip(pairs, copies, strict=True)
    ]


def recover(num_workers: int, smoke_test: bool) -> dict[str, float]:
    """Kill a worker in the second epoch, and return the figures."""
    options = options_for(num_workers, 2048, smoke_test)
    with tempfile.TemporaryDirectory() as folder:
        with TorchTrainer(
            training_operator_cls=Stamped,
            initialization_hook=partial(time_aborts, folder),
            split_batches=True,
            **{**options, "config": {**options["config"], "folder": folder}},
        ) as trainer:
            trainer.train()
            trainer.train()
            [event] = [event for event in trainer.status().events if event.is_failure]
        found = read_stamps(Path(folder), event.at)
        aborts = [float(path.read_text()) for path in Path(folder).glob("abort-*")]
    figures = {
        "recovery_s": found["ends"] - found["died"],
        "notice_s": event.began_at - found["died"],
        "new_group_s": event.seconds,
        "first_step_s": found["ends"] - event.at,
        "step_s": found["step_s"],
    }
    return {**figures, **({"abort_s": max(aborts)} if aborts else {})}


def recover_with_torchft(peer: str, smoke_test: bool) -> dict[str, float]:
    """Kill one of two workers of torchft, and return the figures."""
    width, device = (64, "cpu") if smoke_test else (2048, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        log = run_groups(peer, 2, [__file__, "--torchft-worker", peer, folder, str(width), device])
        try:
            found = read_stamps(Path(folder))
        except (OSError, ValueError) as error:
            raise JobError(log) from error
    return {"recovery_s": found["ends"] - found["died"], "step_s": found["step_s"]}


def torchft_worker(peer: str, folder: str, width: str, kind: str) -> None:
    """Run one process of `recover_with_torchft`, of any generation."""
    rank = int(os.environ["RANK"])
    device = torch.device(kind, rank % torch.cuda.device_count() if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model, criterion = perceptron(int(width)).to(device), nn.CrossEntropyLoss()
    group = ReplicaGroup(peer, model, sgd(model), folder, 2, kind)
    for features, target in group.batches(samples(), BATCH_SIZE // 2):
        die_if_due(Path(folder), rank, group.num_steps)
        was_dead = (Path(folder) / "died").exists()
        is_kept = group.step(lambda: criterion(model(features.to(device)), target.to(device)))  # noqa: B023 - called at once
        if is_kept and was_dead == (Path(folder) / "died").exists():  # no loss in the middle of the step
            stamp(Path(folder))
        if group.num_steps >= 2 * NUM_STEPS:
            os._exit(0)


def main() -> None:
    if sys.argv[1:2] == ["--torchft-worker"]:
        torchft_worker(*sys.argv[2:])
    parser = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS)
    numbers = {"type": lambda text: [int(each) for each in text.split(",") if each]}
    parser.add_argument(
        "--sizes", default=[2, 4, 8], help="numbers of workers after whose losses to recover", **numbers
    )
    parser.add_argument(
        "--widths", default=[512, 4096], help="sizes of the layers with which to compare loops", **numbers
    )
    parser.add_argument("--pairs", type=int, default=10, help="epochs of each loop")
    parser.add_argument("--json", type=Path, help="file to write after each size")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke_test:
        print(NEEDS)
        return
    if arguments.smoke_test:
        arguments.sizes, arguments.widths, arguments.pairs, arguments.repetitions = [2], [64], 1, 1
    sizes = arguments.sizes
    peers = choose_peers(arguments, PEERS)
    report = Report("gpu_recovery", arguments, peers)
    num_gpus = 0 if arguments.smoke_test else torch.cuda.device_count()
    written, targets = [], []

    def write(rows: list[dict[str, Any]]) -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=1))

    with ray_cluster(num_cpus=max(2, *sizes)):
        for width in arguments.widths:
            pairs = compare(width, arguments.pairs, arguments.smoke_test)
            shared = -(-2 // num_gpus) if num_gpus else 0
            report.figures(f"speed with layers of {width}", SPEED, {OWN: pairs})
            written.append({"width": width, "ranks_on_a_gpu": shared, "pairs": pairs})
            write(written)
        for size in sizes:
            shared = -(-size // num_gpus) if num_gpus else 0
            runs = [recover(size, arguments.smoke_test) for _ in range(arguments.repetitions)]
            name = f"{OWN}, {size} workers" + (f", {shared} on a GPU, which take turns" if shared > 1 else "")
            report.figures(f"{size} workers", FIGURES, {name: runs})
            written.append({"workers": size, "ranks_on_a_gpu": shared, "runs": runs})
            write(written)
            over = estimate([run["recovery_s"] - run["step_s"] for run in runs]).median
            targets.append(Target(f"{size} workers: recovery without a step, s", 0.5, True, over))
    contenders = {peer: partial(recover_with_torchft, peer, arguments.smoke_test) for peer in peers.selected}
    for peer, runs in take_turns(contenders, arguments.repetitions, report).items():
        report.figures(f"{peer}, 2 workers", FIGURES, {peer: runs})
        written.append({"peer": peer, "workers": 2, "runs": runs})
        write(written)
    report.finish(targets)


if __name__ == "__main__":
    main()
