"""Speed with one slow worker: shares by speed against `DistributedDataParallel`.

    python examples/benchmarks/slow_worker.py [--smoke-test] [--repetitions 3] [--peers raw]

Two workers train `mlp_large` with a global batch of 512. One of them gets half of a CPU, by a control group where one
can be made, else by stopping it half of the time; the report says which. The first ten steps are not counted: by then
`balance="speed"` must have found its shares. Ideal is 1.5 times the samples per second of even shares.

What measuring and telling costs where no worker is slow is found in pairs: two trainers in one cluster, with shares by
speed and with even ones, take a few steps in turn. It takes about three minutes.
"""

from __future__ import annotations

import contextlib
import os
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
from _slowed import half_as_fast, way
from _workloads import WORKLOADS, HandWritten, TimedOperator, config_of, step_s

from raysgd import TorchTrainer

PEERS = {"raw": "torch"}
EVEN = "raysgd_even"
NUM_WORKERS = 2
NUM_STEPS_TO_FIND_SHARES = 10
NUM_STEPS_OF_PAIR = 10
NUM_PAIRS = 10
WORKLOAD = WORKLOADS["mlp_large"]
JOINT_SIZE = WORKLOAD.batch_size * NUM_WORKERS


def make_trainer(num_steps: int, balance: str | None) -> TorchTrainer:
    """A trainer with that global batch, and passes of so many steps."""
    workload = WORKLOAD.with_steps(num_steps)
    return TorchTrainer(
        training_operator_cls=TimedOperator,
        config=config_of(workload, NUM_WORKERS, batch_size=JOINT_SIZE),
        num_workers=NUM_WORKERS,
        split_batches=True,
        balance=balance,  # type: ignore[arg-type]
    )


def speed_of(trainer: TorchTrainer, num_steps: int) -> float:
    """Samples per second in some steps."""
    return JOINT_SIZE / step_s(trainer, num_steps)


def slowed_speed_of(trainer: TorchTrainer, num_steps: int) -> float:
    """The same with one slow worker, after a few steps."""
    pid = trainer.apply_all_workers(os.getpid)[1]
    with half_as_fast(pid):
        trainer.train(num_steps=NUM_STEPS_TO_FIND_SHARES)
        return speed_of(trainer, num_steps)


def run_raysgd(num_steps: int, num_pairs: int) -> dict[str, dict[str, Any]]:
    """Both trainers, at first with no slow worker."""
    num_of_pass = num_steps + NUM_STEPS_TO_FIND_SHARES
    with (
        ray_cluster(2 * NUM_WORKERS),
        make_trainer(num_of_pass, "speed") as by_speed,
        make_trainer(num_of_pass, None) as evenly,
    ):
        both = (by_speed, evenly)
        measures = [partial(speed_of, trainer, min(num_steps, NUM_STEPS_OF_PAIR)) for trainer in both]
        pairs = in_pairs(*measures, num_pairs=num_pairs, num_warm_up=1)
        slow = [slowed_speed_of(trainer, num_steps) for trainer in both]
    return {
        OWN: {"slow": slow[0], "even": [pair[0] for pair in pairs], "ratio": [one / other for one, other in pairs]},
        EVEN: {"slow": slow[1], "even": [pair[1] for pair in pairs]},
    }


def run_raw(num_steps: int) -> dict[str, float]:
    """The loop written by hand, under torchrun; rank 1 slows itself down."""
    dist.init_process_group("gloo")
    training = HandWritten(WORKLOAD.with_steps(num_steps), dist.get_rank(), NUM_WORKERS)
    speeds = {}
    for name, is_slow in (("warm_up", False), ("even", False), ("slow", True)):
        with half_as_fast(os.getpid()) if is_slow and dist.get_rank() == 1 else contextlib.nullcontext():
            speeds[name] = JOINT_SIZE * num_steps / training.timed_epoch()
    return speeds


ROLES = {OWN: run_raysgd, "raw": run_raw}


def main() -> None:
    dispatch(ROLES)
    parser = make_parser(__doc__.partition("\n")[0], repetitions=3, peers=PEERS)
    parser.add_argument("--num-steps", type=int, default=30, help="steps that count")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    num_pairs = NUM_PAIRS
    if arguments.smoke_test:
        arguments.repetitions, arguments.num_steps, num_pairs = 1, 3, 1
    report = Report("slow_worker", arguments, peers)
    run = partial(run_job, __file__, num_steps=arguments.num_steps)
    jobs = {
        OWN: partial(run, OWN, num_pairs=num_pairs),
        **{name: partial(run, name, processes=NUM_WORKERS) for name in peers.selected},
    }
    found = take_turns(jobs, arguments.repetitions, report)
    report_runs(report, by_contender(found))


def report_runs(report: Report, runs: dict[str, Sequence[dict[str, Any]]]) -> None:
    """Tables, and what is compared with a target."""
    names = {"slow": "samples/s, one worker at half speed", "even": "samples/s, no slow worker"}
    medians = report.figures(f"One of two workers slowed down by: {way()}", names, runs)
    ratio = report.pairs("No slow worker, in pairs", "by speed / evenly", runs[OWN])
    raw = medians.get(("raw", "slow"))
    report.finish(
        [
            Target(
                "one slow worker: by speed / DistributedDataParallel", 1.4, False, raw and medians[OWN, "slow"] / raw
            ),
            Target("no slow worker: by speed / evenly", 0.99, False, ratio.median),
        ]
    )


if __name__ == "__main__":
    main()
