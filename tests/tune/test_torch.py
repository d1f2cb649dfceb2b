"""`DistributedTrainableCreator` for PyTorch: what it accepts, and what it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from raysgd.torch import func_trainable
from raysgd.tune import torch as tune_torch
from raysgd.tune.torch import DistributedTrainableCreator, is_distributed_trainable
from tests.helpers.run_if import RunIf

pytestmark = RunIf(modules=["ray.tune", "pandas", "pyarrow"])


def train_func(config: dict[str, Any], checkpoint_dir: str | None = None) -> None: ...


@pytest.mark.parametrize(
    "name", ["DistributedTrainableCreator", "distributed_checkpoint_dir", "is_distributed_trainable"]
)
def test_it_is_found_where_the_oldest_programs_look(name: str) -> None:
    assert getattr(func_trainable, name) is getattr(tune_torch, name)


def test_one_bundle_for_each_worker_and_none_for_the_trial() -> None:
    request = DistributedTrainableCreator(train_func, 2, 3, 1).default_resource_request({})
    assert (request.bundles, request.strategy) == ([{"CPU": 3, "GPU": 1}] * 2, "PACK")
    assert request.head_bundle_is_empty


def test_workers_per_host_are_one_bundle_and_hosts_are_apart() -> None:
    request = DistributedTrainableCreator(train_func, 4, num_workers_per_host=2).default_resource_request({})
    assert (request.bundles, request.strategy) == ([{"CPU": 2}] * 2, "STRICT_SPREAD")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "`num_workers=0`"),
        ({"num_workers": 3, "num_workers_per_host": 2}, "`num_workers_per_host=2` does not divide `num_workers=3`"),
        ({"num_workers_per_host": 0}, "`num_workers_per_host=0`"),
        ({"num_cpus_per_worker": -1}, "`num_cpus_per_worker=-1`"),
        ({"backend": "mpi"}, "`backend='mpi'`"),
        ({"timeout_s": 0}, "`timeout_s=0`"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedTrainableCreator(train_func, **options)


def test_a_function_that_does_not_take_a_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="give it these two parameters"):
        DistributedTrainableCreator(lambda config: None)


def test_what_was_retired_says_what_to_use() -> None:
    with pytest.raises(DeprecationWarning, match="num_gpus_per_worker"):
        DistributedTrainableCreator(train_func, use_gpu=True)


def test_the_driver_is_no_worker() -> None:
    assert not is_distributed_trainable()
