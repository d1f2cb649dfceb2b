"""How many classes of the library a reader passes from a trainer to its last method."""

from __future__ import annotations

import importlib

import pytest

from tests.helpers.run_if import RunIf

TRAINERS = [
    "raysgd:TorchTrainer",
    pytest.param("raysgd:TFTrainer", marks=RunIf(modules=["tensorflow"])),
    "raysgd.train:Trainer",
    "raysgd.train.base_trainer:BaseTrainer",
    "raysgd.train.data_parallel_trainer:DataParallelTrainer",
    "raysgd.train.torch:TorchTrainer",
    pytest.param("raysgd.train.tensorflow:TensorflowTrainer", marks=RunIf(modules=["tensorflow"])),
    pytest.param("raysgd.train.horovod:HorovodTrainer", marks=RunIf(modules=["horovod"])),
]


@pytest.mark.parametrize("place", TRAINERS)
def test_a_public_trainer_has_at_most_three_bases_of_the_library(place: str) -> None:
    module, _, name = place.partition(":")
    own, *bases = getattr(importlib.import_module(module), name).__mro__
    assert own.__name__ == name
    assert len([base.__name__ for base in bases if base.__module__.startswith("raysgd.")]) <= 3
