"""The cost of bit-identical results: `deterministic=True` against the usual all-reduce, and against DDP.

    python examples/benchmarks/determinism.py [--smoke-test] [--num-workers 4] [--repetitions 3] [--peers raw]

Four workers train `mlp_large` without failures. Two trainers in one cluster, with and without `deterministic=True`,
train an epoch in turn; the seconds are those of the loop on the slowest worker. The hand-written loop has its own
processes. The digest of the weights shows whether two runs gave the same bits. The benchmark takes about three
minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from _common import (
    OWN,
    Report,
    Target,
    by_contender,
    choose_peers,
    dispatch,
    in_pairs,
    make_parser,
    ray_cluster,
    run_job,
    take_turns,
)
from _workloads import WORKLOADS, HandWritten, TimedOperator, config_of, step_s

from raysgd import TorchTrainer

PEERS = {"raw": "torch"}
USUAL = "raysgd_usual"
WORKLOAD = WORKLOADS["mlp_large"]


def make_trainer(num_workers: int, num_steps: int, deterministic: bool) -> TorchTrainer:
    """Return a trainer whose epochs have this many steps."""
    return TorchTrainer(
        training_operator_cls=TimedOperator,
        config=config_of(WORKLOAD.with_steps(num_steps), num_workers),
        num_workers=num_workers,
        deterministic=deterministic,
        seed=1,
    )


def speed_of(trainer: TorchTrainer) -> float:
    """Return the steps per second in an epoch."""
    return 1 / step_s(trainer)


def run_raysgd(num_workers: int, num_steps: int, num_epochs: int) -> dict[str, dict[str, Any]]:
    """Measure both trainers, and return the digest of the deterministic one's final weights."""
    with (
        ray_cluster(2 * num_workers),
        make_trainer(num_workers, num_steps, True) as deterministic,
        make_trainer(num_workers, num_steps, False) as usual,
    ):
        measures = [partial(speed_of, trainer) for trainer in (deterministic, usual)]
        pairs = in_pairs(*measures, num_pairs=num_epochs, num_warm_up=1)
        weights = deterministic.get_model(to_cpu=True).parameters()
        digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).hexdigest()
    own, other = zip(*pairs, strict=True)
    ratio = [first / second for first, second in pairs]
    return {OWN: {"steps_per_s": own, "ratio": ratio, "digest": digest}, USUAL: {"steps_per_s": other}}


def run_raw(num_workers: int, num_steps: int, num_epochs: int) -> dict[str, Any]:
    """Run the hand-written loop under torchrun."""
    dist.init_process_group("gloo")
    training = HandWritten(WORKLOAD.with_steps(num_steps), dist.get_rank(), num_workers)
    training.timed_epoch()
    return {"steps_per_s": [num_steps / training.timed_epoch() for _ in range(num_epochs)]}


ROLES = {OWN: run_raysgd, "raw": run_raw}


def main() -> None:
    dispatch(ROLES)
    parser = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS)
    parser.set_defaults(num_workers=4)
    parser.add_argument("--num-epochs", type=int, default=6, help="of each trainer, after one that is not counted")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    num_steps = 12
    if arguments.smoke_test:
        arguments.repetitions, arguments.num_epochs, arguments.num_workers, num_steps = 2, 1, 2, 3
    report = Report("determinism", arguments, peers)
    num_workers = arguments.num_workers
    run = partial(run_job, __file__, num_workers=num_workers, num_steps=num_steps, num_epochs=arguments.num_epochs)
    jobs = {OWN: partial(run, OWN), **{name: partial(run, name, processes=num_workers) for name in peers.selected}}
    found = take_turns(jobs, arguments.repetitions, report)
    report_runs(report, by_contender(found))


def report_runs(report: Report, runs: dict[str, Sequence[dict[str, Any]]]) -> None:
    """Print the tables, and the comparison with the target."""
    medians = report.figures("mlp_large, undisturbed", {"steps_per_s": "steps/s"}, runs)
    ratio = report.pairs("In pairs", "deterministic / usual", runs[OWN])
    num_digests = len({run["digest"] for run in runs[OWN]})
    report.result(OWN, "num_digests", num_digests)
    raw = medians.get(("raw", "steps_per_s"))
    report.finish(
        [
            Target("steps/s: deterministic / usual", 0.9, False, ratio.median),
            Target(
                "steps/s: deterministic / DistributedDataParallel",
                0.9,
                False,
                raw and medians[OWN, "steps_per_s"] / raw,
            ),
            Target("different weights after runs of the same seed", 1, True, num_digests),
        ]
    )


if __name__ == "__main__":
    main()
