"""State handed over, and waits ended, in a real process group."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from raysgd.core.cluster.resources import Resources
from raysgd.core.connections.mesh.mesh import Mesh
from raysgd.core.connections.torch import TorchConnection
from raysgd.core.engine.group import WorkerGroup
from raysgd.core.engine.shared.interface import GroupSpec
from raysgd.torch.parallel import handover
from tests.helpers.fakes import CountingReplica
from tests.helpers.patience import hearing_all_losses
from tests.torch.operators_for_tests import equal

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
TAKERS = [2, 0]


@pytest.fixture(scope="module")
def trio(ray_cluster: None) -> Iterator[WorkerGroup]:
    group = WorkerGroup(GroupSpec(TorchConnection(timeout_s=60), CountingReplica, Resources(num_cpus=0.5)), 3)
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


def hand_over(replica: CountingReplica, names: list[str], piece_bytes: int | None) -> list[Any]:
    """Rank 1 sends what the names stand for, the others return what they got.

    Args:
        replica: At its rank.
        names: Of states.
        piece_bytes: The size of the buffers to go through, as with NCCL; None to go over the mesh.
    """
    with patch.object(handover, "STAGED_BYTES", piece_bytes or 0), ExitStack() as patches:
        if piece_bytes is not None:
            patches.enter_context(patch.object(handover, "mesh_group", lambda: None))
        if replica.world.rank == 1:
            for name in names:
                handover.send(STATES[name], TAKERS, CPU)
            return []
        return [handover.receive(1, TAKERS, CPU) for _ in names]


@pytest.mark.parametrize("piece_bytes", [None, 100_000])
def test_a_state_arrives_at_all_takers_as_it_was_sent_one_after_the_other(
    trio: WorkerGroup, piece_bytes: int | None
) -> None:
    names = [*STATES, "tensors"]
    report = trio.on_replica(hand_over, dict.fromkeys(range(3), (names, piece_bytes)))
    assert report.ok, report
    for taker in TAKERS:
        got = report.values[taker]
        assert [equal(state, STATES[name]) for state, name in zip(got, names, strict=True)] == [True] * len(names)
        assert got[2]["half"].dtype == torch.bfloat16
        assert got[2]["nobody"].shape == (0, 4)


def change_what_came(replica: CountingReplica) -> float:
    rank = replica.world.rank
    if rank == 1:
        weight = torch.zeros(2)
        handover.send({"weight": weight}, TAKERS, CPU)
    else:
        weight = handover.receive(1, TAKERS, CPU)["weight"]
        weight.fill_(5.0 + rank)
    torch.distributed.barrier()
    return weight[0].item()


def test_what_was_received_is_the_receivers_own_to_change(trio: WorkerGroup) -> None:
    report = trio.on_replica(change_what_came, dict.fromkeys(range(3), ()))
    assert report.values == [5.0, 0.0, 7.0]


def hand_over_and_die(replica: CountingReplica, lost: int) -> None:
    """Hands over more than the sockets on the way hold; one rank dies in the middle of it."""
    rank, num_moves = replica.world.rank, 0
    swap = Mesh.swap

    def move(*args: Any, **kwargs: Any) -> None:
        nonlocal num_moves
        num_moves += 1
        if rank == lost and num_moves == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        swap(*args, **kwargs)

    with patch.object(Mesh, "swap", move):
        if rank == 1:
            handover.send(torch.zeros(2**24), TAKERS, CPU)
        else:
            handover.receive(1, TAKERS, CPU)


@pytest.mark.parametrize("lost", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_death_of_the_giver_or_of_a_taker_is_a_loss_that_all_others_notice(ray_cluster: None, lost: int) -> None:
    spec = GroupSpec(TorchConnection(timeout_s=600), CountingReplica, Resources(num_cpus=0.5), regroups=True)
    group = WorkerGroup(spec, 3)
    assert group.start().ok
    try:
        with hearing_all_losses():
            report = group.on_replica(hand_over_and_die, dict.fromkeys(range(3), (lost,)))
        kinds = [answer.failure and answer.failure.kind for answer in report.outcomes]
        assert kinds == ["died" if rank == lost else "disconnected" for rank in range(3)]
        assert group.settle(report) == [rank for rank in range(3) if rank != lost]
    finally:
        group.kill(10)
