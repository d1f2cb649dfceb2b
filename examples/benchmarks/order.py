"""The order of a shuffled epoch: the time until its first batch, and the memory in each worker.

    python examples/benchmarks/order.py [--smoke-test] [--repetitions 3] [--samples 100000000] [--batch-sizes 32,1024]

Each contender runs in its own process, opens an epoch over this many samples in its middle, as a worker does after a
failure, and takes batches of indices. raysgd computes the order while it is read. The peer draws a whole permutation
with `torch.randperm`, like torch's `RandomSampler`, and like raysgd below 2**20 samples. The results are the time
until the first batch, and the growth of the peak memory of the process. The time of one batch shows the cost of
computing later batches; drawing has no such cost.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time
from functools import partial
from typing import Any

from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, run_job, take_turns

from raysgd.torch.data.sample_order import ShuffledOrder
from raysgd.torch.data.sampling import ElasticBatchSampler

PEERS = {"randperm": "torch"}
FIGURES = {"open_s": "seconds to the first batch", "memory_mib": "MiB"}
DRAWN_BELOW = {OWN: 0, "randperm": sys.maxsize}
NUM_BATCHES = 200


def peak_mib() -> float:
    """Return the peak memory of the process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, samples: int, batch_sizes: list[int]) -> dict[str, float]:
    """Open one epoch in its middle, with batches of each size, in a separate process."""
    order = ShuffledOrder(samples, DRAWN_BELOW[way])
    ShuffledOrder(1000, DRAWN_BELOW[way]).indices(1, 0)[:10]  # work that a process does once
    before, began = peak_mib(), time.perf_counter()
    sampler = ElasticBatchSampler(order, batch_sizes[0], False, True, rank=0, world_size=1)
    sampler.plan_pass(1, seed=7, consumed=samples // 2)
    next(iter(sampler))
    found = {"open_s": time.perf_counter() - began, "memory_mib": peak_mib() - before}
    for size in batch_sizes:
        sampler.reshape(rank=0, world_size=1, batch_size=size)
        sampler.plan_pass(1, seed=7, consumed=samples // 2)
        began = time.perf_counter()
        count = sum(1 for _ in itertools.islice(sampler, NUM_BATCHES))
        found[f"batch_of_{size}_us"] = (time.perf_counter() - began) / count * 1e6
    return found


def main() -> None:
    """Run both contenders and print their results."""
    parser = make_parser("The order of a shuffled pass", repetitions=3, peers=PEERS)
    parser.add_argument("--samples", type=int, default=10**8, help="how many there are in the pass")
    parser.add_argument("--batch-sizes", default="32,1024", help="how many indices are read at once")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    report = Report("order", arguments, peers)
    samples, repetitions = (10**4, 1) if arguments.smoke_test else (arguments.samples, arguments.repetitions)
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    jobs = {
        way: partial(run_job, __file__, "measure", way=way, samples=samples, batch_sizes=sizes)
        for way in (OWN, *peers.selected)
    }
    runs: dict[str, list[Any]] = take_turns(jobs, repetitions, report)
    names = {**FIGURES, **{f"batch_of_{size}_us": f"one batch of {size}, us" for size in sizes}}
    medians = report.figures(f"{samples:,} samples", names, runs)
    report.finish([_target(medians, figure) for figure in FIGURES])


def _target(medians: dict[tuple[str, str], float], figure: str) -> Target:
    drawn = medians.get(("randperm", figure))
    ratio = medians[OWN, figure] / drawn if drawn else None
    return Target(f"{figure} / that of randperm", 0.05, True, ratio)


if __name__ == "__main__":
    dispatch({"measure": measure})
    main()
