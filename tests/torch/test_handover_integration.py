"""State handed over, and waits ended, in a real process group of two."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from raysgd.connections.torch import TorchConnection
from raysgd.engine.group_spec import GroupSpec
from raysgd.engine.types import Resources
from raysgd.engine.worker import WorkerFailed
from raysgd.engine.worker_group import WorkerGroup
from raysgd.torch import handover
from tests.fakes import CountingReplica
from tests.torch.operators_for_tests import equal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(ray_cluster: None) -> Iterator[WorkerGroup]:
    group = WorkerGroup(GroupSpec(TorchConnection(timeout_s=60), CountingReplica, Resources(num_cpus=0.5)), 2)
    assert group.start().ok
    yield group
    group.kill(10)


STATES: dict[str, Any] = {
    "nothing": None,
    "no tensor": {"epoch": 3, "name": "x"},
    "tensors": {
        "weight": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "nobody": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
    },
    "large": [torch.arange(300_000.0), {"deep": torch.full((1000,), 2, dtype=torch.int64)}],
}


def hand_over(replica: CountingReplica, names: list[str]) -> list[Any]:
    """Rank 0 sends what the names stand for, rank 1 returns what it got."""
    got = []
    for name in names:
        if replica.world.rank == 0:
            handover.send(STATES[name], [1], CPU)
        else:
            got.append(handover.receive(0, CPU))
    return got


def test_a_state_arrives_as_it_was_sent_one_after_the_other(pair: WorkerGroup) -> None:
    names = [*STATES, "tensors"]
    report = pair.on_replica(hand_over, {0: (names,), 1: (names,)})
    assert report.ok, report
    got = report.values[1].value
    assert [equal(state, STATES[name]) for state, name in zip(got, names, strict=True)] == [True] * len(names)
    assert got[2]["half"].dtype == torch.bfloat16
    assert got[2]["nobody"].shape == (0, 4)


def change_what_came(replica: CountingReplica) -> tuple[float, float]:
    if replica.world.rank == 0:
        weight = torch.zeros(2)
        handover.send({"weight": weight}, [1], CPU)
        torch.distributed.barrier()
        return weight[0].item(), 0.0
    state = handover.receive(0, CPU)
    state["weight"].fill_(5.0)
    torch.distributed.barrier()
    return 0.0, state["weight"][0].item()


def test_what_was_received_is_the_receivers_own_to_change(pair: WorkerGroup) -> None:
    report = pair.on_replica(change_what_came, {0: (), 1: ()})
    assert [answer.value for answer in report.values] == [(0.0, 0.0), (0.0, 5.0)]


def wait_for_the_other(replica: CountingReplica) -> None:
    torch.distributed.all_reduce(torch.zeros(1))


def test_an_interruption_frees_a_rank_whose_peer_is_stopped(ray_cluster: None) -> None:
    group = WorkerGroup(GroupSpec(TorchConnection(timeout_s=600), CountingReplica, Resources(num_cpus=0.5)), 2)
    assert group.start().ok
    try:
        os.kill(group.infos[1].pid, signal.SIGSTOP)
        stuck = group.submit(0, "on_replica", wait_for_the_other, False, None)
        with pytest.raises(ray.exceptions.GetTimeoutError):
            ray.get(stuck, timeout=0.5)
        ray.get(group.submit(0, "interrupt"), timeout=20)
        with pytest.raises(WorkerFailed) as caught:
            ray.get(stuck, timeout=20)
        assert caught.value.cause.failure.kind == "disconnected"  # type: ignore[attr-defined]
        ray.get(group.submit(0, "interrupt"), timeout=20)  # a second time it has nothing to cut
    finally:
        os.kill(group.infos[1].pid, signal.SIGKILL)
        group.kill(10)
