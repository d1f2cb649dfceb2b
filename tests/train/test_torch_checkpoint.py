from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.train.torch import TorchCheckpoint


def net(value: float) -> torch.nn.Linear:
    layer = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def test_a_model_comes_back_through_all_forms(tmp_path: Path) -> None:
    checkpoint = TorchCheckpoint.from_model(net(3.0), preprocessor="scaler")
    assert checkpoint.to_dict().keys() == {"_preprocessor", "model"}
    read = TorchCheckpoint.from_directory(checkpoint.to_directory(tmp_path))
    for each in (checkpoint, read, pickle.loads(pickle.dumps(read))):
        assert each.get_model().weight.tolist() == [[3.0, 3.0]]
        assert each.get_preprocessor() == "scaler"


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_state_is_loaded_into_a_model(prefix: str) -> None:
    state = {prefix + name: value for name, value in net(4.0).state_dict().items()}
    target = net(0.0)
    assert TorchCheckpoint.from_state_dict(state).get_model(target) is target
    assert target.weight.tolist() == [[4.0, 4.0]]


def test_the_wrapper_of_a_model_is_left_out(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        wrapped: Any = torch.nn.parallel.DistributedDataParallel(net(6.0))
        assert type(TorchCheckpoint.from_model(wrapped).get_model()) is torch.nn.Linear
    finally:
        torch.distributed.destroy_process_group()


def test_a_state_needs_a_model() -> None:
    with pytest.raises(ValueError, match="`model=None`"):
        TorchCheckpoint.from_state_dict(net(1.0).state_dict()).get_model()


def test_a_checkpoint_without_a_model_says_so() -> None:
    with pytest.raises(RuntimeError, match=r'no "model"\. Available: \[\'epoch\'\]'):
        TorchCheckpoint.from_dict({"epoch": 1}).get_model()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="`model=3`"):
        TorchCheckpoint.from_model(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`state_dict=3`"):
        TorchCheckpoint.from_state_dict(3)  # type: ignore[arg-type]


def test_a_model_that_is_not_used_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raysgd.train"):
        TorchCheckpoint.from_model(net(1.0)).get_model(net(2.0))
    assert "`model` is ignored" in caplog.text


class Opens:
    """Makes a mesh of devices, which opens a port. PyTorch's reader alone allows this."""

    def __reduce__(self) -> Any:
        return DeviceMesh, ("cpu", [0])


@pytest.mark.parametrize("content", [Opens(), torch.zeros(1).expand(10**9)], ids=type)
def test_a_file_of_a_state_holds_only_what_a_checkpoint_may_hold(content: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = TorchCheckpoint.from_directory(tmp_path).get_model(torch.nn.Linear(2, 1))
    assert torch.equal(found.weight, model.weight)
    torch.save({**model.state_dict(), "more": content}, tmp_path / "model.pt")
    with pytest.raises((UnsafeCheckpointError, CheckpointCorruptedError), match=r"model\.pt`"):
        TorchCheckpoint.from_directory(tmp_path).get_model(torch.nn.Linear(2, 1))
