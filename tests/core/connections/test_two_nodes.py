"""Ranks on two nodes, which are network namespaces: gradients over the mesh, and a rank that dies.

    python -m tests.core.connections.test_two_nodes

forks four processes on two nodes with a slow network between them, and prints as JSON what they did, or why there can
be no such nodes here.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from raysgd.core.connections.torch import TorchConnection, mesh_group
from raysgd.core.engine.shared.types import Rendezvous, World
from raysgd.torch.parallel.strategy import DDP
from tests.helpers.stories import ROOT

if TYPE_CHECKING:
    from _network import Node

SIZE, WIDTH, NUM_SAMPLES = 4, 1024, 32
DELAY_S, LOSS = 0.002, 0.01


class Process:
    """One process on a node, which does what it is told."""

    def __init__(self, node: Node) -> None:
        self.host = node.host
        context = multiprocessing.get_context("fork")
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(node, there), daemon=True)
        self.process.start()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def answer(self) -> Any:
        return self._pipe.recv()


def _serve(node: Node, pipe: Pipe) -> None:
    with node.inside():
        connection = TorchConnection(timeout_s=60)
        while True:
            function, args = pipe.recv()
            try:
                pipe.send(function(connection, *args))
            except ConnectionError as error:
                connection.give_up(error)
                pipe.send(type(error).__name__)


def open_endpoint(connection: TorchConnection, host: str) -> tuple[str, int]:
    connection.leave_for_another()
    return host, connection.open_endpoint(host)


def gradient(connection: TorchConnection, place: Rendezvous, world: World) -> tuple[str, float]:
    """Joins, takes a step with a share of the data; what its gradient is, in short, and how far from that of all."""
    connection.join(place, world)
    model, data = _model_and_data()
    parallel = DDP()
    wrapped = parallel.wrap(model, None, {})
    parallel.attach([wrapped])
    parallel.sync.begin_leg([wrapped], may_run_backward=False)
    assert wrapped._comm_hooks, "else gloo exchanges the gradients"
    wrapped(data.chunk(world.size)[world.rank]).square().mean().backward()
    found = model.weight.grad
    assert isinstance(found, torch.Tensor)
    distance = float((found - _gradient_of_one()).abs().max() / _gradient_of_one().abs().max())
    return hashlib.sha256(found.numpy().tobytes()).hexdigest(), distance


def add_up(connection: TorchConnection) -> str:
    group = mesh_group()
    assert group is not None
    group.add_up(np.ones(10))
    return "done"


def _model_and_data() -> tuple[torch.nn.Linear, torch.Tensor]:
    torch.manual_seed(7)
    return torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(NUM_SAMPLES, WIDTH)


def _gradient_of_one() -> torch.Tensor:
    model, data = _model_and_data()
    model(data).square().mean().backward()
    assert isinstance(model.weight.grad, torch.Tensor)
    return model.weight.grad


def on_all(processes: Sequence[Process], function: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
    """What it returns in each; `args` have an entry for each process."""
    for process, *own in zip(processes, *args, strict=True):
        process.begin(function, *own)
    return [process.answer() for process in processes]


def step(group: Sequence[Process]) -> list[Any]:
    """Forms a group and takes a step in it."""
    place = Rendezvous(tuple(on_all(group, open_endpoint, [each.host for each in group])), on_one_node=False)
    worlds = [World(rank, SIZE, rank % 2, 2, node_rank=rank // 2) for rank in range(SIZE)]
    return on_all(group, gradient, [place] * SIZE, worlds)


def run(nodes: Sequence[Node]) -> dict[str, Any]:
    *group, spare = [Process(node) for node in (nodes[0], nodes[0], nodes[1], nodes[1], nodes[1])]
    before = step(group)
    victim = group.pop()
    for process in group:
        process.begin(add_up)
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    broken = [process.answer() for process in group]
    return {"before": before, "broken": broken, "after": step([*group, spare])}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.core.connections.test_two_nodes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "cannot" in found:
        pytest.skip(f"this process may not make network namespaces: {found['cannot']}")
    return found


@pytest.mark.program
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_of_a_large_bucket_are_alike_on_all_ranks_and_those_of_one_process(
    found: dict[str, Any], when: str
) -> None:
    digests, distances = zip(*found[when], strict=True)
    assert len(set(digests)) == 1
    assert max(distances) < 1e-5


@pytest.mark.program
def test_ranks_of_both_nodes_notice_one_that_dies_and_go_on_with_another(found: dict[str, Any]) -> None:
    assert found["broken"] == ["MeshBroken"] * 3
    assert found["before"] == found["after"]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))
    from _network import DEVICE, network

    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    torch.set_num_threads(1)
    try:
        with network(2, DELAY_S, LOSS) as nodes:
            print(json.dumps(run(nodes)))
    except OSError as error:
        print(json.dumps({"cannot": str(error)}))
