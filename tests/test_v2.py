from __future__ import annotations

from typing import Any

import pytest

import raysgd.train.callbacks
import raysgd.v2
import raysgd.v2.callbacks
from raysgd import train
from raysgd.engine.types import World
from raysgd.train._hand_off import Ended
from raysgd.train.session import FunctionSession, Order
from raysgd.train.torch import TorchConfig


def test_the_first_names_are_the_classes_of_today() -> None:
    assert raysgd.v2.SGDCallback is train.TrainingCallback
    assert raysgd.v2.SGDIterator is train.TrainingIterator
    assert raysgd.v2.SGDWorkerGroup is train.TrainWorkerGroup
    assert raysgd.v2.Trainer is train.Trainer
    assert raysgd.v2.TorchConfig is TorchConfig
    assert all(hasattr(raysgd.v2, name) for name in raysgd.v2.__all__)
    with pytest.raises(AttributeError, match="`SGDTrainer`"):
        _ = raysgd.v2.SGDTrainer


def test_the_callbacks_are_where_they_were() -> None:
    assert raysgd.v2.callbacks.SGDCallback is train.TrainingCallback
    assert raysgd.v2.callbacks.JsonLoggerCallback is raysgd.train.callbacks.JsonLoggerCallback


@pytest.mark.parametrize("name", ["report", "save_checkpoint", "load_checkpoint", "world_rank", "local_rank"])
def test_a_function_outside_of_a_run_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` was called outside"):
        getattr(raysgd.v2, name)()


def test_a_function_inside_of_a_run_is_that_of_today() -> None:
    def function() -> Any:
        raysgd.v2.report(loss=1)
        return raysgd.v2.world_rank(), raysgd.v2.load_checkpoint()

    replica = FunctionSession(World(rank=1, size=2))
    replica.begin(Order(function, dict, "_timestamp"), {"epoch": 2}, None)
    replica.next()
    assert replica.next() == Ended((1, {"epoch": 2}))
