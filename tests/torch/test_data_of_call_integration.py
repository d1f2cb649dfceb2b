"""A call over data that only it has goes on after a loss, in the samples that are left.

Covers `raysgd.torch.data.feed` in a group of several processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from raysgd import Recovery, testing
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.torch.ledger import Ledger, uses
from tests.torch.operators_for_tests import dataset

pytestmark = pytest.mark.integration

NUM_SAMPLES, JOINT_BATCH = 120, 12
OPTIONS: dict[str, Any] = {
    "config": {"num_samples": NUM_SAMPLES, "batch_size": JOINT_BATCH},
    "num_cpus_per_worker": 0.5,
    "split_batches": True,
    "recovery": Recovery(wait_for_workers=False, resize_interval_s=600.0),
}


class WithoutLoader(Ledger):
    def register_data(self, **loaders: Any) -> None:
        """Everything comes with the calls."""


def kinds(trainer: TorchTrainer) -> list[str]:
    return [event.kind for event in controller_of(trainer).history.events if event.is_failure]


def loader_of(data: TensorDataset) -> DataLoader[Any]:
    return DataLoader(data, batch_size=JOINT_BATCH, shuffle=True)


@pytest.mark.parametrize("make", [lambda data: data, loader_of], ids=["dataset", "loader"])
def test_each_sample_of_the_call_is_used_once(ray_cluster: None, make: Any) -> None:
    data = make(dataset(NUM_SAMPLES))
    with TorchTrainer(training_operator_cls=WithoutLoader, num_workers=3, **OPTIONS) as trainer:
        testing.kill_worker(trainer, 0, at="step:3")
        first = trainer.train(dataset=data, num_steps=5)
        assert kinds(trainer) == ["continued"]
        testing.kill_worker(trainer, 0, at="step:2")
        second = trainer.train(dataset=data)
        assert kinds(trainer) == ["continued"] * 2
        assert first["num_samples"] + second["num_samples"] == NUM_SAMPLES
        assert (first["epoch"], second["epoch"]) == (1, 2)
        assert uses(trainer) == {1}


class OwnSampler(RandomSampler):
    """Not one that the library knows. With `counts`, each pass depends on those that it has drawn before."""

    def __init__(self, data: TensorDataset, counts: bool) -> None:
        super().__init__(data)
        self.num_drawn, self.counts = 0, counts

    def __iter__(self) -> Iterator[int]:
        drawn = list(super().__iter__())
        self.num_drawn += self.counts
        return iter(drawn[self.num_drawn :] + drawn[: self.num_drawn])


@pytest.mark.parametrize("counts", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_an_order_that_the_user_draws_is_gone_on_with_if_a_new_worker_draws_the_same(
    ray_cluster: None, counts: bool
) -> None:
    data = dataset(NUM_SAMPLES)
    loader = DataLoader(data, batch_size=JOINT_BATCH, sampler=OwnSampler(data, counts))
    options = {
        **OPTIONS,
        "recovery": Recovery(wait_for_workers=True, resize_interval_s=None),
    }  # wait for the new worker
    with TorchTrainer(training_operator_cls=WithoutLoader, num_workers=2, **options) as trainer:
        trainer.train(dataset=loader)
        testing.kill_worker(trainer, 1, at="step:3")
        trainer.train(dataset=loader)
        assert kinds(trainer)[-1] == ("restored" if counts else "continued")
        assert uses(trainer) == {2}


class Buckets(Sampler[list[int]]):
    """Batches of 1 to 4 samples, in an order that a generator decides."""

    def __init__(self, num_samples: int) -> None:
        parts = torch.arange(num_samples).split([1 + number % 4 for number in range(num_samples * 2 // 5)])
        self.batches = [part.tolist() for part in parts]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batches[number] for number in torch.randperm(len(self)).tolist())


class WithBuckets(Ledger):
    def register_data(self, **loaders: Any) -> None:
        super().register_data(train_loader=DataLoader(dataset(NUM_SAMPLES), batch_sampler=Buckets(NUM_SAMPLES)))

    def optimizer_step(self) -> None:
        self.sizes = [*getattr(self, "sizes", ()), (self.net.used.grad != 0).sum().item()]
        super().optimizer_step()


def test_each_batch_of_a_batch_sampler_is_a_global_batch_that_stays(ray_cluster: None, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "config": {"num_samples": NUM_SAMPLES}, "seed": 3}
    with TorchTrainer(training_operator_cls=WithBuckets, num_workers=3, **options) as trainer:
        testing.kill_worker(trainer, 0, at="step:9")
        first = trainer.train(num_steps=20)
        assert kinds(trainer) == ["continued"]
        trainer.save(str(tmp_path / "middle"))
    with TorchTrainer(training_operator_cls=WithBuckets, num_workers=2, **options) as trainer:
        trainer.load(str(tmp_path / "middle"))
        second = trainer.train()
        assert first["num_samples"] + second["num_samples"] == NUM_SAMPLES
        assert uses(trainer) == {1}
        several = trainer.state_dict()["models"][0]
    local = {**options, "use_local": True, "num_cpus_per_worker": 1}
    with TorchTrainer(training_operator_cls=WithBuckets, **local) as trainer:
        assert trainer.train()["num_samples"] == NUM_SAMPLES
        one = trainer.state_dict()["models"][0]
        [alone] = trainer.apply_all_operators(lambda operator: operator.sizes)
    assert sorted(alone) == sorted(1 + number % 4 for number in range(48))
    torch.testing.assert_close(several, one, rtol=1e-6, atol=1e-6)
