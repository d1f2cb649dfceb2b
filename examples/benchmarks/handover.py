"""Handover: how long it takes until new workers have the state of another worker.

    python examples/benchmarks/handover.py [--smoke-test] [--repetitions 7] [--takers 1,2,3] [--mib 200]

One process has a state of tensors of 4 MiB each; the others receive it, all in one group over loopback. The peers are
what you would write by hand: `dist.send` to one process after the other, as raysgd itself did before, and
`dist.broadcast`. A receiver uses new memory, like a worker that has just started. All contenders take turns in the
same processes. The result is the time until the last process has everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _common import MIB, OWN, Report, Target, choose_peers, dispatch, make_parser, run_job, take_turns
from _ranks import on_ranks

from raysgd.torch.parallel import handover

PEERS = {"dist_send": "torch", "dist_broadcast": "torch"}
TENSOR_MIB = 4
CPU = torch.device("cpu")


def by_raysgd(rank: int, takers: list[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Send the state as raysgd does when a group is formed."""
    if rank == 0:
        handover.send(tensors, takers, CPU)
        return tensors
    received: list[torch.Tensor] = handover.receive(0, takers, CPU)
    return received


def by_send(rank: int, takers: list[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Send the state to one process after the other."""
    if rank:
        received = [torch.empty_like(tensor) for tensor in tensors]
        for tensor in received:
            dist.recv(tensor, 0)
        return received
    for taker in takers:
        for tensor in tensors:
            dist.send(tensor, taker)
    return tensors


def by_broadcast(rank: int, takers: list[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Send the state to all processes at once, tensor by tensor."""
    received = [torch.empty_like(tensor) for tensor in tensors] if rank else tensors
    for tensor in received:
        dist.broadcast(tensor, 0)
    return received


WAYS: dict[str, Callable[[int, list[int], list[torch.Tensor]], list[torch.Tensor]]] = {
    OWN: by_raysgd,
    "dist_send": by_send,
    "dist_broadcast": by_broadcast,
}


def hand_over(rank: int, size: int, mib: int, repetitions: int, ways: list[str]) -> dict[str, list[float]]:
    """Return the seconds of each handover, by contender, in every process of the group."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    tensors = [torch.full((TENSOR_MIB * MIB // 4,), float(index)) for index in range(max(1, mib // TENSOR_MIB))]
    takers = list(range(1, size))
    for _ in range(1 + repetitions):
        for way in ways:
            dist.barrier()
            began = time.perf_counter()
            received = WAYS[way](rank, takers, tensors)
            dist.barrier()
            found[way].append(time.perf_counter() - began)
            assert all(torch.equal(one, other) for one, other in zip(received, tensors, strict=True)), way
    return {way: seconds[1:] for way, seconds in found.items()}  # the first run opens the connections


def measure(takers: int, mib: int, repetitions: int, ways: list[str]) -> dict[str, list[float]]:
    """Run one group of processes."""
    found: dict[str, list[float]] = on_ranks(1 + takers, hand_over, mib, repetitions, ways)
    return found


def main() -> None:
    """Run the contenders and print their times."""
    parser = make_parser("How long until new workers have the state of another one", repetitions=7, peers=PEERS)
    parser.add_argument("--takers", default="1,2,3", help="how many processes get the state")
    parser.add_argument("--mib", type=int, default=200, help="the size of the state")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    report = Report("handover", arguments, peers)
    counts = [1] if arguments.smoke_test else [int(count) for count in arguments.takers.split(",")]
    mib, repetitions = (8, 1) if arguments.smoke_test else (arguments.mib, arguments.repetitions)
    ways, targets = [OWN, *peers.selected], []
    for count in counts:
        job = partial(run_job, __file__, "measure", takers=count, mib=mib, repetitions=repetitions, ways=ways)
        [found] = take_turns({OWN: job}, 1, report)[OWN]
        runs: dict[str, Any] = {way: [{"handover_s": found[way]}] for way in ways}
        medians = report.figures(f"{mib} MiB to {count}", {"handover_s": "seconds until the last one has it"}, runs)
        before = medians.get(("dist_send", "handover_s"))
        ratio = medians[OWN, "handover_s"] / before if before else None
        targets.append(Target(f"time to {count} takers / that of dist.send in turn", 1.0, True, ratio))
    report.finish(targets)


if __name__ == "__main__":
    dispatch({"measure": measure})
    main()
