"""The names that handles treat in their own way, compared with the trainers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from raysgd import TFTrainer, TorchTrainer
from raysgd.host.handle import HostedTrainer
from raysgd.host.interface import BESIDE, MAY_GO_ON, STAYS_THERE
from raysgd.train import Trainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer

TRAINERS = (TorchTrainer, TFTrainer, Trainer, DataParallelTrainer)


def public_names(trainer_cls: type[Any]) -> dict[str, bool]:
    """The names of a trainer, and which of them are methods."""
    names: dict[str, bool] = {}
    for owner in trainer_cls.__mro__:
        for name, value in {**dict.fromkeys(inspect.get_annotations(owner)), **vars(owner)}.items():
            if not name.startswith("_"):
                names.setdefault(name, callable(value) or isinstance(value, classmethod | staticmethod))
    return names


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_a_host_tells_methods_from_attributes_by_the_class(trainer_cls: type[Any]) -> None:
    names = public_names(trainer_cls)
    assert names == {name: callable(getattr(trainer_cls, name, None)) for name in names}


def test_there_are_no_names_here_that_no_trainer_has() -> None:
    names = {name for trainer_cls in TRAINERS for name in public_names(trainer_cls)}
    assert sorted({*BESIDE, *MAY_GO_ON, *STAYS_THERE} - names) == []


def test_the_handle_itself_has_none_of_these_names() -> None:
    names = {name for trainer_cls in TRAINERS for name in public_names(trainer_cls)} - {"shutdown"}
    assert sorted(names & {*vars(HostedTrainer)}) == []
