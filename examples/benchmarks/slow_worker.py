"""Speed with one slow worker: shares by speed against `DistributedDataParallel`.

    python examples/benchmarks/slow_worker.py [--smoke-test] [--repetitions 3] [--peers raw]

Two workers train `mlp_large` with a joint batch of 512. One of them gets half of a CPU, by a control group where one
can be made, else by stopping it half of the time; the report says which. Ten steps are not counted: by then
`balance="speed"` must have found its shares. Ideal is 1.5 times the samples per second of even shares. The same without
a slow worker says what the measuring and telling costs.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch.distributed as dist
from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from _slowed import half_as_fast, way
from _workloads import WORKLOADS, HandWritten, StockOperator, TimedOperator, Workload, config_of, sgd, workload_of
from torch import nn
from torch.utils.data import DataLoader

from raysgd import TorchTrainer

PEERS = {"raw": "torch"}
NUM_WORKERS = 2
NUM_STEPS_TO_FIND_SHARES = 10


class JointOperator(TimedOperator):
    """The stock loop over joint batches."""

    def setup(self, config: dict[str, Any]) -> None:
        StockOperator.setup(self, config)
        workload = workload_of(config)
        model = workload.model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.CrossEntropyLoss()
        )
        joint_size = workload.batch_size * config["world_size"]
        data = workload.dataset(config["world_size"])
        self.register_data(train_loader=DataLoader(data, batch_size=joint_size, shuffle=True))
        self.train_epoch = self._timed(self.train_epoch)  # type: ignore[method-assign]


def _workload(num_steps: int) -> Workload:
    return WORKLOADS["mlp_large"].with_steps(num_steps)


def run_raysgd(num_steps: int, balance: str | None) -> dict[str, float]:
    """Samples per second, with a slow worker and without."""
    workload = _workload(num_steps + NUM_STEPS_TO_FIND_SHARES)
    speeds = {}
    for name, is_slow in (("slow", True), ("even", False)):
        with (
            ray_cluster(NUM_WORKERS),
            TorchTrainer(
                training_operator_cls=JointOperator,
                config=config_of(workload, NUM_WORKERS),
                num_workers=NUM_WORKERS,
                joint_batch="constant",
                balance=balance,  # type: ignore[arg-type]
            ) as trainer,
        ):
            pid = trainer.apply_all_workers(os.getpid)[1]
            with half_as_fast(pid) if is_slow else contextlib.nullcontext():
                trainer.train(num_steps=NUM_STEPS_TO_FIND_SHARES)
                results = trainer.train(num_steps=num_steps, reduce_results=False)
        joint_size = workload.batch_size * NUM_WORKERS
        speeds[name] = joint_size * num_steps / max(result["loop_s"] for result in results)
    return speeds


def run_balanced(num_steps: int) -> dict[str, float]:
    """With shares by speed."""
    return run_raysgd(num_steps, "speed")


def run_even(num_steps: int) -> dict[str, float]:
    """With even shares."""
    return run_raysgd(num_steps, None)


def run_raw(num_steps: int) -> dict[str, float]:
    """The loop written by hand, under torchrun; rank 1 slows itself down."""
    dist.init_process_group("gloo")
    speeds = {}
    for name, is_slow in (("even", False), ("slow", True)):
        workload = _workload(num_steps)
        training = HandWritten(workload, dist.get_rank(), NUM_WORKERS)
        with half_as_fast(os.getpid()) if is_slow and dist.get_rank() == 1 else contextlib.nullcontext():
            dist.barrier()
            began = time.perf_counter()
            training.train_epoch_of_all()
            speeds[name] = workload.num_samples(NUM_WORKERS) / (time.perf_counter() - began)
    return speeds


ROLES = {OWN: run_balanced, "raysgd_even": run_even, "raw": run_raw}


def main() -> None:
    dispatch(ROLES)
    parser = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS)
    parser.add_argument("--num-steps", type=int, default=40, help="steps that count")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    if arguments.smoke_test:
        arguments.repetitions, arguments.num_steps = 1, 3
    report = Report("slow_worker", arguments, peers)
    jobs = {
        name: lambda name=name: run_job(  # type: ignore[misc]
            __file__, name, processes=NUM_WORKERS if name == "raw" else None, num_steps=arguments.num_steps
        )
        for name in (OWN, "raysgd_even", *peers.selected)
    }
    runs = take_turns(jobs, arguments.repetitions, report)
    names = {"slow": "samples/s, one worker at half speed", "even": "samples/s, no slow worker"}
    found = report.figures(f"One of two workers slowed down by: {way()}", names, runs)
    report.finish(
        [
            Target(f"{name}: raysgd by speed / {peer}", bound, False, _ratio(found, name, peer))
            for name, peer, bound in (("slow", "raw", 1.4), ("even", "raysgd_even", 0.99))
        ]
    )


def _ratio(found: dict[Any, float], figure: str, peer: str) -> float | None:
    return found[OWN, figure] / found[peer, figure] if (peer, figure) in found else None


if __name__ == "__main__":
    main()
