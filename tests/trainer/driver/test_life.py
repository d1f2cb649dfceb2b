"""When the workers of a trainer end, if the program does not shut it down."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raysgd import TorchTrainer
from tests.torch.operators_for_tests import LinearOperator


def make() -> TorchTrainer:
    return TorchTrainer(training_operator_cls=LinearOperator, use_local=True, config={"lr": 0.01})


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Only counts of references free objects in the test."""
    with make() as trainer:  # the first call in a process imports modules, and imports that fail hold on to frames
        trainer.train()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


CALLS: dict[str, Callable[[TorchTrainer], Any]] = {
    "train": lambda trainer: trainer.train(),
    "validate": lambda trainer: trainer.validate(),
    "update_config": lambda trainer: trainer.update_config(lr=0.1),
    "reload": lambda trainer: trainer.reload(LinearOperator),
}


@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize("name", CALLS)
def test_the_workers_end_as_soon_as_the_program_drops_the_trainer(name: str) -> None:
    trainer = make()
    CALLS[name](trainer)
    controller, dropped = trainer._life.controller, weakref.ref(trainer)
    del trainer
    assert dropped() is None
    assert controller.stopped.is_set()
