from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import raysgd.train.callbacks
import raysgd.v2
import raysgd.v2.callbacks
from raysgd import train
from raysgd.core.engine.shared.types import World
from raysgd.core.state.state_codec import lend
from raysgd.exceptions import MissingFrameworkError
from raysgd.train import CheckpointStrategy
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.messages import FunctionEnded, FunctionSpec
from raysgd.train.backend import BackendConfig
from tests.helpers.run_if import RunIf


def test_all_public_names_are_there() -> None:
    assert issubclass(raysgd.v2.Trainer, train.Trainer)
    assert all(hasattr(raysgd.v2, name) for name in raysgd.v2.__all__)
    with pytest.raises(AttributeError, match="`SGDTrainer`"):
        _ = raysgd.v2.SGDTrainer


@pytest.mark.integration
@pytest.mark.usefixtures("ray_cluster")
def test_arguments_have_their_first_order(tmp_path: Path) -> None:
    trainer = raysgd.v2.Trainer(BackendConfig(), logdir=tmp_path)
    trainer.start()
    try:
        assert trainer.run(raysgd.v2.load_checkpoint, None, None, {"epoch": 2}, CheckpointStrategy(1)) == [{"epoch": 2}]
        iterator = trainer.run_iterator(raysgd.v2.load_checkpoint, None, {"epoch": 3}, CheckpointStrategy(1))
        assert list(iterator) == []
        assert iterator.get_final_results() == [{"epoch": 3}]
        assert trainer.run(train.get_dataset_shard, dataset=Numbers()) == [[0, 1]]
    finally:
        trainer.shutdown()


class Numbers:
    """Data to divide."""

    def split(self, n: int, *, equal: bool) -> list[list[int]]:
        return [list(range(2))[rank::n] for rank in range(n)]


# What `ray.util.sgd.v2` and `ray.train` had, where it is found now, and what it is.
NAMES = [
    ("v2:TrainingCallback", "train:TrainingCallback"),
    ("v2:SGDCallback", "train:TrainingCallback"),
    ("v2:SGDIterator", "train:TrainingIterator"),
    ("v2:SGDWorkerGroup", "train:TrainWorkerGroup"),
    ("v2:TorchConfig", "train.torch:TorchConfig"),
    ("v2:TrainingIterator", "train:TrainingIterator"),
    ("v2.trainer:SGDIterator", "train:TrainingIterator"),
    ("v2.callbacks:SGDCallback", "train:TrainingCallback"),
    *((f"v2.callbacks:{name}", f"train.callbacks:{name}") for name in raysgd.train.callbacks.__all__),
]


@pytest.mark.parametrize(("place", "other_place"), NAMES, ids=[place for place, _ in NAMES])
def test_what_moved_is_found_where_it_was(place: str, other_place: str) -> None:
    assert found_at(place) is found_at(other_place)


def found_at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"raysgd.{module}"), name)


@pytest.mark.parametrize(
    ("config", "module", "missing"),
    [
        ("TorchConfig", "raysgd.train.torch", "torch"),
        ("TensorflowConfig", "raysgd.train.tensorflow", "tensorflow"),
        pytest.param("HorovodConfig", "raysgd.train.horovod", "horovod.torch", marks=RunIf(modules=["horovod"])),
    ],
)
def test_a_config_whose_framework_is_missing_says_so_and_the_others_are_there(
    monkeypatch: pytest.MonkeyPatch, config: str, module: str, missing: str
) -> None:
    monkeypatch.delattr(raysgd.v2, config)  # which finds it, or an earlier test has
    for name in [name for name in sys.modules if name == module or name.startswith("raysgd.train._torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingFrameworkError, match=r"which is not installed\. Run: ") as caught:
        getattr(raysgd.v2, config)
    assert isinstance(caught.value, ModuleNotFoundError)
    assert isinstance(caught.value, ValueError)
    names: dict[str, Any] = {}
    exec("from raysgd.v2 import *", names)
    assert set(raysgd.v2.__all__) <= set(names)


@pytest.mark.parametrize(
    "name",
    ["report", "save_checkpoint", "load_checkpoint", "world_rank", "local_rank", "world_size", "get_dataset_shard"],
)
def test_a_function_outside_of_a_run_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` was called outside"):
        getattr(raysgd.v2, name)()


def test_a_function_inside_of_a_run_is_that_of_today() -> None:
    def function() -> Any:
        raysgd.v2.report(loss=1)
        return raysgd.v2.world_rank(), raysgd.v2.load_checkpoint()

    replica = FunctionReplica(World(rank=1, size=2))
    replica.start(FunctionSpec(function, dict, "_timestamp"), lend({"epoch": 2}))
    replica.next()
    assert replica.next() == FunctionEnded((1, {"epoch": 2}))
