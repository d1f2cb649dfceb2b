"""Recovery over NCCL: from the SIGKILL of a worker to the end of the next step of the others, and where the time goes.

    python examples/benchmarks/gpu_recovery.py [--smoke-test] [--repetitions 3] [--sizes 2,4,8]

It needs NVIDIA GPUs; otherwise it says so and ends. With fewer GPUs than workers, it needs NCCL 2.30 or later with
`NCCL_MULTI_RANK_GPU_ENABLE=1`, so that several ranks run on one GPU. They take turns there, so these figures are no
figures of several GPUs, and the report says how many ranks shared a GPU. `--smoke-test` runs on the CPU over gloo, only
to check that it runs.

The victim writes down when it dies, and every worker when each of its steps has ended on the device. The time between
is split into: notice (until the driver knows), new group (until the others have left the broken group, which includes
`ncclCommAbort`, and formed a new one), and first step. The abort is measured in the workers.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _common import OWN, Report, Target, choose_peers, estimate, make_parser, ray_cluster
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator

FIGURES = {
    "recovery_s": "kill -> end of the next step, s",
    "notice_s": "notice, s",
    "new_group_s": "new group, s",
    "first_step_s": "first step, s",
    "abort_s": "of which abort, s",
    "step_s": "a step before, s",
}
VICTIM, KILLED_AFTER, NUM_STEPS = 1, 20, 40
NEEDS = (
    "gpu_recovery needs an NVIDIA GPU and a PyTorch that sees it (`torch.cuda.is_available()` is False here), so it "
    "measured nothing. Run it on a machine with one, or pass `--smoke-test` to see that it runs, on the CPU."
)


class Stamped(TrainingOperator):
    """Writes down when its steps have ended on the device, and when it dies."""

    def setup(self, config: dict[str, Any]) -> None:
        width = config["width"]
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
        )
        data = TensorDataset(torch.randn(64 * NUM_STEPS, 64), torch.randint(10, (64 * NUM_STEPS,)))
        self.register_data(train_loader=DataLoader(data, batch_size=64))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        folder = Path(self.config["folder"])
        if (
            self.world_rank == VICTIM
            and self.global_step == NUM_STEPS + KILLED_AFTER
            and not (folder / "died").exists()
        ):
            (folder / "died").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().train_batch(batch, batch_info)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        with (folder / f"steps-{os.getpid()}").open("a") as file:
            file.write(f"{time.time()!r}\n")
        return result


def time_aborts(folder: str) -> None:
    """In a worker, write down how long `ncclCommAbort` takes."""
    from raysgd.core.connections import torch as connections

    abort: Callable[[], None] = connections._abort_process_group

    def timed() -> None:
        began = time.time()
        abort()
        Path(folder, f"abort-{os.getpid()}").write_text(repr(time.time() - began))

    connections._abort_process_group = timed


def recover(num_workers: int, smoke_test: bool) -> dict[str, float]:
    """Kill a worker in the second epoch, and return the figures."""
    num_gpus = 0 if smoke_test else torch.cuda.device_count()
    num_on_a_gpu = -(-num_workers // max(1, num_gpus))
    options: dict[str, Any] = {"use_gpu": bool(num_gpus), "backend": "nccl" if num_gpus else "gloo"}
    if num_gpus:
        options["num_gpus_per_worker"] = 1 if num_on_a_gpu == 1 else 10_000 // num_on_a_gpu / 10_000
    with tempfile.TemporaryDirectory() as folder:
        with TorchTrainer(
            training_operator_cls=Stamped,
            config={"folder": folder, "width": 64 if smoke_test else 2048},
            initialization_hook=partial(time_aborts, folder),
            num_workers=num_workers,
            split_batches=True,
            num_cpus_per_worker=0.5,
            **options,
        ) as trainer:
            trainer.train()
            trainer.train()
            [event] = [event for event in trainer.status().events if event.is_failure]
        died = float((Path(folder) / "died").read_text())
        stamps = [sorted(map(float, path.read_text().split())) for path in Path(folder).glob("steps-*")]
        ends = min(min(after) for each in stamps if (after := [end for end in each if end > event.at]))
        before = [later - earlier for each in stamps for earlier, later in pairwise(each) if later < died]
        aborts = [float(path.read_text()) for path in Path(folder).glob("abort-*")]
    figures = {
        "recovery_s": ends - died,
        "notice_s": event.began_at - died,
        "new_group_s": event.seconds,
        "first_step_s": ends - event.at,
        "step_s": sorted(before)[len(before) // 2],
    }
    return {**figures, **({"abort_s": max(aborts)} if aborts else {})}


def main() -> None:
    parser = make_parser(__doc__.partition("\n")[0], repetitions=3, peers={})
    parser.add_argument("--sizes", default="2,4,8", help="numbers of workers")
    parser.add_argument("--json", type=Path, help="file to write after each size")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke_test:
        print(NEEDS)
        return
    sizes = [2] if arguments.smoke_test else [int(size) for size in arguments.sizes.split(",")]
    arguments.repetitions = 1 if arguments.smoke_test else arguments.repetitions
    report = Report("gpu_recovery", arguments, choose_peers(arguments, {}))
    num_gpus = 0 if arguments.smoke_test else torch.cuda.device_count()
    written, targets = [], []
    with ray_cluster(num_cpus=max(sizes)):
        for size in sizes:
            shared = -(-size // num_gpus) if num_gpus else 0
            runs = [recover(size, arguments.smoke_test) for _ in range(arguments.repetitions)]
            name = f"{OWN}, {size} workers" + (f", {shared} on a GPU, which take turns" if shared > 1 else "")
            report.figures(f"{size} workers", FIGURES, {name: runs})
            written.append({"workers": size, "ranks_on_a_gpu": shared, "runs": runs})
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(written, indent=1))
            over = estimate([run["recovery_s"] - run["step_s"] for run in runs]).median
            targets.append(Target(f"{size} workers: recovery without a step, s", 0.5, True, over))
    report.finish(targets)


if __name__ == "__main__":
    main()
