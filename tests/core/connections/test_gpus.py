"""Ids of GPUs, and which ordinal CUDA gives them in a process."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch

from raysgd.core.connections.torch import TorchConnection, ordinal_of, visible_to_all
from raysgd.core.engine.shared.types import World
from tests.core.connections.ranks import boards_of


@pytest.mark.parametrize(
    ("gpu_id", "visible", "ordinal"),
    [
        ("0", None, 0),
        ("3", None, 3),
        ("3", "", 3),
        ("3", "3", 0),
        ("3", "5,3,1", 1),
        ("3", " 5, 3", 1),
        ("GPU-8932f937", "GPU-1,GPU-8932f937", 1),
    ],
)
def test_a_gpu_is_counted_in_the_list_of_the_process(gpu_id: str, visible: str | None, ordinal: int) -> None:
    assert ordinal_of(gpu_id, visible) == ordinal


@pytest.mark.parametrize(("gpu_id", "visible"), [("3", "0,1"), ("GPU-1", None), ("GPU-1", "GPU-2")])
def test_a_gpu_that_the_process_cannot_see_is_named(gpu_id: str, visible: str | None) -> None:
    with pytest.raises(RuntimeError, match=f"GPU {gpu_id} is reserved .* with {gpu_id} in that variable"):
        ordinal_of(gpu_id, visible)


@pytest.mark.parametrize(
    ("own", "of_node", "expected"),
    [
        ("0", ["0", "1"], ("0,1", 0)),
        ("1", ["0", "1"], ("0,1", 1)),
        ("2,3", ["0,1", "2,3"], ("0,1,2,3", 2)),
        ("0", ["0", "0"], ("0", 0)),
        ("1", ["1", "0"], ("1,0", 0)),
        ("0", ["0", ""], ("0", 0)),
        ("", ["", ""], ("", 0)),
    ],
)
def test_workers_of_a_node_see_the_gpus_of_all(own: str, of_node: list[str], expected: tuple[str, int]) -> None:
    assert visible_to_all(own, of_node) == expected


class Chosen:
    """What was asked of CUDA, which is not here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_visible: int = 8) -> None:
        self.ordinals: list[int] = []
        self._num_visible = num_visible
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.cuda, "set_device", self._choose)

    def _choose(self, ordinal: int) -> None:
        if ordinal >= self._num_visible:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.ordinals.append(ordinal)


def test_the_driver_computes_on_the_gpu_that_is_held_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2")
    TorchConnection("nccl").use_gpus(["2"])
    assert chosen.ordinals == [1]
    TorchConnection("nccl").use_gpus([])
    assert chosen.ordinals == [1], "nothing is held inside an actor: its own device is the right one"


def test_the_driver_names_its_gpu_to_every_group_and_keeps_seeing_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    connection = TorchConnection("nccl")
    connection.use_gpus(["2"])
    for _ in range(2):
        connection.leave()  # as each rank does before it listens for the next group
        with boards_of(2) as boards:
            connection._board = boards[1]
            boards[0].put("raysgd/gpus/0", json.dumps([0, "1"]).encode())
            connection._see_gpus_of_node(World(rank=1, size=2, local_rank=1, local_size=2))
            assert json.loads(boards[0].get("raysgd/gpus/1", 10.0)) == [0, "2"]
    assert chosen.ordinals == [2]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_without_cuda_a_held_gpu_is_nothing_to_choose() -> None:
    TorchConnection("gloo").use_gpus(["0"])


def see_gpus(own: str, other: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What rank 1 sees after it met rank 0, which has `other`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    with boards_of(2) as boards:
        connection = TorchConnection("nccl", _board=boards[1])
        late = threading.Timer(0.05, boards[0].put, ("raysgd/gpus/0", json.dumps([0, other]).encode()))
        late.start()
        connection._see_gpus_of_node(World(rank=1, size=2, local_rank=1, local_size=2))
        late.join()
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_workers_side_by_side_see_one_anothers_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch)
    assert see_gpus("3", "1", monkeypatch) == "1,3"
    assert chosen.ordinals == [1]


def test_where_cuda_has_looked_already_everything_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch, num_visible=1)
    assert see_gpus("3", "1", monkeypatch) == "3"
    assert chosen.ordinals == [0]


@pytest.mark.parametrize(
    ("words", "is_failure"),
    [("invalid usage (run with NCCL_DEBUG=WARN for details)", False), ("unhandled system error", True)],
)
def test_two_ranks_on_one_gpu_are_no_loss(words: str, is_failure: bool) -> None:
    error = torch.distributed.DistBackendError(f"NCCL error in: NCCLUtils.cpp:93, {words}, NCCL version 2.28.9")
    assert TorchConnection("nccl", 1.0, 1.0).is_connection_error(error) is is_failure
