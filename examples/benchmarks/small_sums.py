"""All-reduce over many processes: raysgd's own connections against gloo.

    python examples/benchmarks/small_sums.py [--smoke-test] [--repetitions 15] [--sizes 4,16,40] [--bytes 400,65536]
    python examples/benchmarks/small_sums.py --rows [--sizes 2,4,8]
    python examples/benchmarks/small_sums.py --nodes 2 --delay-ms 2 --loss 0.01 --sizes 2,4,8 --bytes 65536,2097152

All processes are on this machine, in one group over loopback, and alternate between the two contenders: some sums of
raysgd, some of gloo's `all_reduce`, and so on. The results are the time of one sum, and the ratio of the two within a
turn. With more processes than cores, this measures the total work of a sum for all processes, not the latency of
messages.

With `--rows`, there is a third contender: raysgd's sum with an exchange of running sums of metrics, as in each
training step.

With `--nodes`, the processes are distributed equally over the nodes, with a network between them that delays and
loses packets (Linux, as root).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _common import OWN, Report, Target, choose_peers, dispatch, make_parser, run_job, scaled, take_turns
from _network import DEVICE, Node, network
from _ranks import on_ranks

from raysgd.core.connections.torch import mesh_group
from raysgd.core.numbers.meters import AverageMeterCollection
from raysgd.trainer.worker.rank_rows import RankRows, RowExchange

PEERS = {"gloo": "torch"}
WITH_ROWS = "raysgd_with_rows"
SUMS_PER_TURN = 5


def by_raysgd(numbers: np.ndarray[Any, Any]) -> None:
    """Sum as for gradients of small models."""
    group = mesh_group()
    assert group is not None
    group.add_up(numbers)


def by_gloo(numbers: np.ndarray[Any, Any]) -> None:
    """Sum as `DistributedDataParallel` does by default."""
    dist.all_reduce(torch.from_numpy(numbers))


class WithRows:
    """Sums as for gradients of small models, together with the metrics that each rank sends to the others.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        group = mesh_group()
        assert group is not None
        self._group, self._meters = group, AverageMeterCollection()
        call = SimpleNamespace(meters=self._meters, rows=RankRows(str(rank)), num_batches_completed=0)
        self._exchange = RowExchange(call, group.gather)
        self._loss = torch.tensor(0.5)

    def __call__(self, numbers: np.ndarray[Any, Any]) -> None:
        self._meters.update({"train_loss": self._loss}, 32)
        self._exchange.take_rows(self._group.add_up_with(numbers, self._exchange.row_to_send()))


WAYS: dict[str, Callable[[np.ndarray[Any, Any]], None]] = {OWN: by_raysgd, "gloo": by_gloo}


def add_up(rank: int, size: int, num_bytes: int, repetitions: int, ways: list[str]) -> dict[str, list[float]]:
    """Return the seconds of one sum in each turn, by contender, in every process of the group."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    functions = {**WAYS, WITH_ROWS: WithRows(rank)}
    for _ in range(1 + repetitions):
        for way in ways:
            numbers = np.ones(num_bytes // 4, np.float32)
            dist.barrier()
            began = time.perf_counter()
            for _ in range(SUMS_PER_TURN):
                functions[way](numbers)
            found[way].append((time.perf_counter() - began) / SUMS_PER_TURN)
            assert math.isclose(numbers[0], float(size) ** SUMS_PER_TURN, rel_tol=1e-5), way
    return {way: seconds[1:] for way, seconds in found.items()}  # the first run opens the connections


def measure(
    size: int, num_bytes: int, repetitions: int, ways: list[str], num_nodes: int, delay_s: float, loss: float
) -> dict[str, list[float]]:
    """Run one group of processes."""
    places: AbstractContextManager[list[Node]] = nullcontext([])
    if num_nodes > 1:
        places = network(num_nodes, delay_s, loss)
    with places as nodes:
        found: dict[str, list[float]] = on_ranks(size, add_up, num_bytes, repetitions, ways, nodes=nodes)
    return found


def main() -> None:
    """Run both contenders and print their results."""
    parser = make_parser("Sums over many processes", repetitions=15, peers=PEERS)
    parser.add_argument("--sizes", default="4,16,40", help="how many processes")
    parser.add_argument("--bytes", default="400,65536,1048576", help="how large the arrays are")
    parser.add_argument("--rows", action="store_true", help="also with running sums of metrics")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes the processes are on")
    parser.add_argument("--delay-ms", type=float, default=2.0, help="how long a packet between nodes is on its way")
    parser.add_argument("--loss", type=float, default=0.0, help="the share of packets between nodes that are lost")
    arguments = parser.parse_args()
    peers = choose_peers(arguments, PEERS)
    report = Report("small_sums", arguments, peers)
    sizes, amounts = arguments.sizes.split(","), arguments.bytes.split(",")
    if arguments.smoke_test:
        sizes, amounts, arguments.repetitions = ["2"], ["400"], 1
    ways, targets = [OWN, *[WITH_ROWS] * arguments.rows, *peers.selected], []
    place = {"num_nodes": arguments.nodes, "delay_s": arguments.delay_ms / 1e3, "loss": arguments.loss}
    environment = {"GLOO_SOCKET_IFNAME": DEVICE} if arguments.nodes > 1 else {}
    for size in map(int, sizes):
        for num_bytes in map(int, amounts):
            what = {"size": size, "num_bytes": num_bytes, "repetitions": arguments.repetitions, "ways": ways}
            job = partial(run_job, __file__, "measure", environment=environment, **what, **place)
            [found] = take_turns({OWN: job}, 1, report)[OWN]
            runs = {way: [{"sum_us": scaled(found[way], 1e6)}] for way in ways}
            report.figures(f"{num_bytes} bytes, {size} processes", {"sum_us": "one sum, us"}, runs)
            ratios = [own / other for own, other in zip(found[OWN], found.get("gloo", []), strict=False)]
            ratio = statistics.median(ratios) if ratios else None
            targets.append(Target(f"{num_bytes} bytes, {size} processes: time / that of gloo", 1.0, True, ratio))
    report.finish(targets)


if __name__ == "__main__":
    dispatch({"measure": measure})
    main()
