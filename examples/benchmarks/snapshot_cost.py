"""What a snapshot after a call takes, beyond its copy, and which share of the time snapshots take.

    python examples/benchmarks/snapshot_cost.py [--smoke-test] [--repetitions 3] [--num-workers 2]

`mlp_large` is trained with Adam (31 MiB of state) in calls of one step, with the default pace of snapshots. A snapshot
stops rank 0 for a copy of the state at the end of a call. Its transfer to the driver then competes with the next call
for memory and cores. So the cost of a snapshot is what its call and the next call take longer than other calls, by
their medians within one run. There are `--repetitions` runs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from _common import OWN, Report, Target, choose_peers, dispatch, estimate, make_parser, ray_cluster, run_job
from _workloads import WORKLOADS, StockOperator, config_of, copies_made, watch_copies
from torch import nn

from raysgd import TorchTrainer

NUM_CALLS, NUM_WARM_UP_CALLS = 400, 20
MOST_SHARE = 0.02


class AdamOperator(StockOperator):
    """The workload with Adam, whose state is twice as large as the model."""

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())


def measure(num_workers: int, num_calls: int) -> dict[str, float]:
    """Milliseconds of a copy and of a snapshot, and the share of the time that snapshots took."""
    config = config_of(WORKLOADS["mlp_large"].with_steps(1), num_workers)
    with (
        ray_cluster(num_workers),
        TorchTrainer(training_operator_cls=AdamOperator, config=config, num_workers=num_workers) as trainer,
    ):
        trainer.apply_all_workers(watch_copies)
        for _ in range(NUM_WARM_UP_CALLS):
            trainer.train()
        ends = [time.perf_counter()]
        for _ in range(num_calls):
            trainer.train()
            ends.append(time.perf_counter())
        copies = [each for each in trainer.apply_all_workers(copies_made)[0] if ends[0] <= each[0] < ends[-1]]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    has_copy = [any(before <= at < after for at, _ in copies) for before, after in itertools.pairwise(ends)]
    is_next = [False, *has_copy[:-1]]
    plain_s = _median(each for each, *marks in zip(seconds, has_copy, is_next, strict=True) if not any(marks))
    with_s = _median(each for each, has in zip(seconds, has_copy, strict=True) if has)
    next_s = _median(each for each, has, after in zip(seconds, has_copy, is_next, strict=True) if after and not has)
    snapshot_s = with_s + next_s - 2 * plain_s
    return {
        "call_ms": plain_s * 1e3,
        "copy_ms": _median(copy_s for _, copy_s in copies) * 1e3,
        "snapshot_ms": snapshot_s * 1e3,
        "share_of_time": snapshot_s * len(copies) / (ends[-1] - ends[0]),
    }


def _median(values: Any) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def main() -> None:
    dispatch({"measure": measure})
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=3, peers={}).parse_args()
    report = Report("snapshot_cost", arguments, choose_peers(arguments, {}))
    num_runs, num_calls = (1, 5) if arguments.smoke_test else (arguments.repetitions, NUM_CALLS)
    runs = [
        run_job(__file__, "measure", num_workers=arguments.num_workers, num_calls=num_calls) for _ in range(num_runs)
    ]
    figures = {name: estimate([run[name] for run in runs]) for name in runs[0]}
    for name, value in figures.items():
        report.result(OWN, name, value, workload="mlp_large")
    headers = ["call without snapshot, ms", "copy, ms", "snapshot, ms", "share of the time"]
    report.table("Snapshots after calls of one step", headers, [[value.text() for value in figures.values()]])
    report.finish([Target("share of the time", MOST_SHARE, True, figures["share_of_time"].median)])


if __name__ == "__main__":
    main()
