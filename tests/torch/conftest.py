"""Fixtures for the tests of the class API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import torch.distributed as dist

from raysgd.core.connections.torch import end_process_group
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.torch import gate, lab, operators_for_tests
from tests.torch.gate import Gate
from tests.torch.operators_for_tests import LinearOperator


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let workers use what a test module defines, without a path to the tests."""
    modules = (operators_for_tests, lab, gate, request.module)
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def newcomers(tmp_path: Path) -> Gate:
    """The gate through which new workers come; it is open."""
    return Gate(tmp_path / "closed")


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of one rank, in which models are wrapped as in a larger one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_group()


@pytest.fixture(scope="module")
def two(ray_cluster: None) -> Iterator[TorchTrainer]:
    """A trainer with two workers, in which tests run replicas side by side."""
    with TorchTrainer(
        training_operator_cls=LinearOperator, num_workers=2, min_workers=2, num_cpus_per_worker=0.5, use_gpu=False
    ) as trainer:
        yield trainer


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
