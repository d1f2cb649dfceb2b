"""What the same bits cost: `deterministic=True` against the usual exchange, and against `DistributedDataParallel`.

    python examples/benchmarks/determinism.py [--smoke-test] [--num-workers 4] [--repetitions 3] [--peers raw]

Four workers train `mlp_large`, and nothing happens to them. Each contender has processes of its own, in turn; the
seconds are those of the loop on the slowest worker, of all epochs but the first. The digest of the weights says whether
two runs came to the same bits.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch.distributed as dist
from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, ray_cluster, run_job, take_turns
from _workloads import WORKLOADS, HandWritten, TimedOperator, config_of

from raysgd import TorchTrainer

PEERS = {"raw": "torch"}
USUAL = "raysgd_usual"


def run_raysgd(num_workers: int, num_steps: int, num_epochs: int, deterministic: bool) -> dict[str, Any]:
    """Steps per second, and the digest of the weights."""
    workload = WORKLOADS["mlp_large"].with_steps(num_steps)
    with (
        ray_cluster(num_workers),
        TorchTrainer(
            training_operator_cls=TimedOperator,
            config=config_of(workload, num_workers),
            num_workers=num_workers,
            deterministic=deterministic,
            seed=1,
        ) as trainer,
    ):
        seconds = [max(result["loop_s"] for result in trainer.train(reduce_results=False)) for _ in range(num_epochs)]
        weights = trainer.get_model(to_cpu=True).parameters()
        digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).hexdigest()
    return {"steps_per_s": num_steps * (num_epochs - 1) / sum(seconds[1:]), "digest": digest}


def run_deterministic(num_workers: int, num_steps: int, num_epochs: int) -> dict[str, Any]:
    """With logical shards."""
    return run_raysgd(num_workers, num_steps, num_epochs, deterministic=True)


def run_usual(num_workers: int, num_steps: int, num_epochs: int) -> dict[str, Any]:
    """Without."""
    return run_raysgd(num_workers, num_steps, num_epochs, deterministic=False)


def run_raw(num_workers: int, num_steps: int, num_epochs: int) -> dict[str, Any]:
    """The loop written by hand, under torchrun."""
    dist.init_process_group("gloo")
    training = HandWritten(WORKLOADS["mlp_large"].with_steps(num_steps), dist.get_rank(), num_workers)
    seconds = []
    for _ in range(num_epochs):
        dist.barrier()
        began = time.perf_counter()
        training.train_epoch_of_all()
        seconds.append(time.perf_counter() - began)
    return {"steps_per_s": num_steps * (num_epochs - 1) / sum(seconds[1:])}


ROLES = {OWN: run_deterministic, USUAL: run_usual, "raw": run_raw}


def main() -> None:
    dispatch(ROLES)
    parser = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS)
    parser.set_defaults(num_workers=4)
    parser.add_argument("--num-epochs", type=int, default=5, help="the first is not counted")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    num_steps = 12
    if arguments.smoke_test:
        arguments.repetitions, arguments.num_epochs, arguments.num_workers, num_steps = 2, 2, 2, 3
    report = Report("determinism", arguments, peers)
    jobs = {
        name: lambda name=name: run_job(  # type: ignore[misc]
            __file__,
            name,
            processes=arguments.num_workers if name == "raw" else None,
            num_workers=arguments.num_workers,
            num_steps=num_steps,
            num_epochs=arguments.num_epochs,
        )
        for name in (OWN, USUAL, *peers.selected)
    }
    runs = take_turns(jobs, arguments.repetitions, report)
    found = report.figures("mlp_large, undisturbed", {"steps_per_s": "steps/s"}, runs)
    digests = {run["digest"] for run in runs[OWN]}
    report.result(OWN, "num_digests", len(digests))
    ratios = {
        name: found[OWN, "steps_per_s"] / found[name, "steps_per_s"]
        for name in (USUAL, "raw")
        if (name, "steps_per_s") in found
    }
    report.finish(
        [
            Target("steps/s: deterministic / usual", 0.9, False, ratios.get(USUAL)),
            Target("steps/s: deterministic / DistributedDataParallel", 0.9, False, ratios.get("raw")),
            Target("different weights after runs of the same seed", 1, True, len(digests)),
        ]
    )


if __name__ == "__main__":
    main()
