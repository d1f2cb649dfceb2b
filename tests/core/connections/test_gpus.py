"""Ids of GPUs, and which ordinal CUDA gives them in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.core.connections import torch as connections
from raysgd.core.connections.mesh.board import Board
from raysgd.core.connections.torch import TorchConnection, ordinal_of, variables_of_nccl, visible_to_all
from raysgd.core.engine.shared.types import World
from tests.core.connections.ranks import boards_of, on_all
from tests.helpers import fakes
from tests.helpers.run_if import RunIf


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
            boards[0].put("raysgd/gpus/0", json.dumps([0, "1", ["1"], ""]).encode())
            connection._see_gpus_of_node(World(rank=1, size=2, local_rank=1, local_size=2))
            assert json.loads(boards[0].get("raysgd/gpus/1", 10.0))[:3] == [0, "2", ["2"]]
    assert chosen.ordinals == [2]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_without_cuda_a_held_gpu_is_nothing_to_choose() -> None:
    TorchConnection("gloo").use_gpus(["0"])


def see_gpus(own: str, other: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What rank 1 sees after it met rank 0, which has `other`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    with boards_of(2) as boards:
        connection = TorchConnection("nccl")
        connection._board = boards[1]
        word = json.dumps([0, other, other.split(","), ""]).encode()
        late = threading.Timer(0.05, boards[0].put, ("raysgd/gpus/0", word))
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
    [
        ("invalid usage (run with NCCL_DEBUG=WARN for details)", False),
        ("Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 4000", False),
        (
            "Last error:\nMultiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable "
            "this configuration.",
            False,
        ),
        ("unhandled system error", True),
    ],
)
def test_two_ranks_on_one_gpu_are_no_loss(words: str, is_failure: bool) -> None:
    error = torch.distributed.DistBackendError(f"NCCL error in: NCCLUtils.cpp:93, {words}, NCCL version 2.28.9")
    assert TorchConnection("nccl", timeout_s=1.0).is_connection_error(error) is is_failure


def meet_on_gpus(*words: list[Any]) -> list[BaseException | None]:
    """What each rank says when ranks with these GPUs meet; each word has the rank's node, its GPU, its obstacle."""
    with boards_of(len(words)) as boards:

        def meet(rank: int, board: Any) -> None:
            node_rank, gpu_id, obstacle = words[rank]
            board.put(f"raysgd/gpus/{rank}", json.dumps([node_rank, gpu_id, [gpu_id], obstacle]).encode())
            connection = TorchConnection("nccl")
            connection._exchange = lambda topic, word: [  # type: ignore[method-assign]
                board.get(f"{topic}/{each}", 10.0) for each in range(len(words))
            ]
            connection._see_gpus_of_node(World(rank, len(words), node_rank=node_rank, gpu_ids=(gpu_id,)))

        return [each.exception() for each in on_all(boards, meet)]


@pytest.mark.parametrize(
    "words",
    [
        [[0, "0", ""], [0, "0", ""]],  # NCCL lets them
        [[0, "0", "too old"], [0, "1", "too old"]],  # a GPU each
        [[0, "0", "too old"], [1, "0", "too old"]],  # on two nodes
    ],
)
def test_ranks_meet_where_nothing_is_shared_or_may_be(words: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert meet_on_gpus(*words) == [None, None]


def test_all_ranks_refuse_to_share_a_gpu_that_one_of_them_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    errors = meet_on_gpus([0, "1", "too old"], [0, "0", ""], [0, "0", "NCCL 2.28.9 is loaded."])
    for error in errors:
        assert isinstance(error, ValueError)
        assert str(error).startswith("rank 2 shares GPU 0 with another rank: NCCL 2.28.9 is loaded.")
        assert '`backend="gloo"`' in str(error)
        assert not TorchConnection("nccl").is_connection_error(error)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a GPU, which is not here, has come through what is queued. An abort of the group lets it through."""
    through = threading.Event()
    event = types.SimpleNamespace(record=lambda: None, query=through.is_set)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(connections, "_abort_process_group", through.set)
    return through


def joined(board: Board, **options: float) -> TorchConnection:
    connection = TorchConnection("nccl", **options)  # type: ignore[arg-type]
    connection._board, connection._parts, connection._has_joined = board, [board], True
    return connection


def test_sums_that_the_gpu_has_completed_are_used(queue: threading.Event) -> None:
    with boards_of(2) as boards:
        connection = joined(boards[0])
        threading.Timer(0.05, queue.set).start()
        connection.wait_for_collectives()
        assert queue.is_set()
        assert not connection.is_broken


@pytest.mark.parametrize("timeout_s", [60.0, 0.05])
def test_sums_that_the_gpu_waits_for_in_vain_are_aborted_and_not_used(queue: threading.Event, timeout_s: float) -> None:
    """The other rank is lost, or late."""
    with boards_of(2) as boards:
        connection = joined(boards[0], timeout_s=timeout_s)
        if timeout_s == 60.0:
            threading.Timer(0.05, boards[1].interrupt).start()
        with pytest.raises(torch.distributed.DistNetworkError) as raised:
            connection.wait_for_collectives()
        assert queue.is_set()
        assert connection.is_connection_error(raised.value)
        assert connection._aborting is not None
        connection._aborting.join()


NCCL = "int ncclGetVersion(int *version) { *version = 23007; return 0; }"
LOOK = """
import ctypes, sys
from raysgd.core.connections.torch import loaded_nccl
before = loaded_nccl()
ctypes.CDLL(sys.argv[1])
print(before, loaded_nccl())
"""


@RunIf(programs=["cc"])
@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch itself loads a library")
def test_the_version_is_that_of_the_library_that_is_loaded(tmp_path: Path) -> None:
    """Not of one that is installed: it is asked only where the process has it already."""
    (tmp_path / "nccl.c").write_text(NCCL)
    library = tmp_path / "libnccl.so.2"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, tmp_path / "nccl.c"]
    subprocess.run(command, check=True)
    found = subprocess.run([sys.executable, "-c", LOOK, library], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["0", "23007"]


def test_workers_get_the_variables_of_nccl_that_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    of_driver = variables_of_nccl()
    assert of_driver == {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    connection = TorchConnection("nccl", variables=of_driver)
    connection._choose_interface(fakes.meeting(1, 2))
    assert (os.environ["NCCL_MULTI_RANK_GPU_ENABLE"], os.environ["NCCL_MAX_CTAS"]) == ("1", "4")
    connection.leave()
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
