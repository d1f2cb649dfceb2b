"""Many processes form one group after the other."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from raysgd.connections.torch import TorchConnection
from raysgd.engine.shared.types import World
from tests.helpers.fakes import meeting

NUM_RANKS = 64
NUM_GROUPS = 5
HERE = "127.0.0.1"


def form_groups(rank: int, said: Any, told: Any) -> None:
    """One rank: opens its endpoint, is told where the others are, adds up over all of them and over half of them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = TorchConnection(timeout_s=120)
    for _ in range(NUM_GROUPS):
        said.put((rank, connection.open_endpoint(HERE, rank)))
        connection.join(told.get(), World(rank, NUM_RANKS, rank, NUM_RANKS))
        numbers = torch.tensor([rank])
        dist.all_reduce(numbers)
        even = dist.new_group(list(range(0, NUM_RANKS, 2)))
        ones = torch.ones(1)
        if rank % 2 == 0:
            dist.all_reduce(ones, group=even)
        said.put((rank, (numbers.item(), ones.item())))
        told.get()  # who leaves ends what others still do
        connection.leave()


@pytest.mark.soak
@pytest.mark.integration
def test_dozens_of_processes_form_one_group_after_the_other() -> None:
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["raysgd.connections.torch", "torch.distributed"])
    said, told = context.Queue(), [context.Queue() for _ in range(NUM_RANKS)]
    processes = [context.Process(target=form_groups, args=(rank, said, told[rank])) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    total = sum(range(NUM_RANKS))
    for _ in range(NUM_GROUPS):
        ports = dict(said.get(timeout=300) for _ in range(NUM_RANKS))
        place = meeting(*(ports[rank] for rank in range(NUM_RANKS)))
        for queue in told:
            queue.put(place)
        sums = dict(said.get(timeout=300) for _ in range(NUM_RANKS))
        assert sums == {rank: (total, NUM_RANKS / 2 if rank % 2 == 0 else 1) for rank in range(NUM_RANKS)}
        for queue in told:
            queue.put("leave")
    for process in processes:
        process.join(60)
    assert {process.exitcode for process in processes} == {0}
