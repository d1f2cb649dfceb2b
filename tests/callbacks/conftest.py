"""Fixtures for the tests of callbacks: trainers with one worker in this process, which start at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raysgd.torch import TorchTrainer, TrainingOperator
from tests.torch.operators_for_tests import LinearOperator


@pytest.fixture
def make_local() -> Iterator[Callable[..., TorchTrainer]]:
    """Make trainers with one worker in this process, and shut them down behind the test."""
    trainers = []

    def make(operator_cls: type[TrainingOperator] = LinearOperator, **options: Any) -> TorchTrainer:
        trainers.append(TorchTrainer(training_operator_cls=operator_cls, use_local=True, **options))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.shutdown()
