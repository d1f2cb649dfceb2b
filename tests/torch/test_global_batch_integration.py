"""A global batch that is constant: the same training on any number of workers, also while workers are lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Recovery, testing
from raysgd.core.engine.shared.types import World
from raysgd.data import Dataset
from raysgd.torch import TorchTrainer
from raysgd.trainer.configuration import BatchOptions
from raysgd.utils import BATCH_SIZE
from tests.helpers.doors import controller_of
from tests.torch.lab import Experiment, run_alone, run_together
from tests.torch.operators_for_tests import (
    NUM_FEATURES,
    BatchNormOperator,
    LinearOperator,
    OwnBatchOperator,
    ScheduledOperator,
    dataset,
)

pytestmark = pytest.mark.integration

FOUR = (2, 3, 5, 6)
JOINT = {"num_samples": 47, "batch_size": 18, "shuffle": True, "optimizer": "adam"}


class InBuckets(LinearOperator):
    """Batches of a batch sampler: of sizes that change, also of one sample, and the last one smaller than a group."""

    def make_loader(self, data: TensorDataset, shuffle: bool = False) -> Any:
        sizes = [18, 1, 5, 7, 2, 13, 1]
        batches = [part.tolist() for part in torch.arange(sum(sizes)).split(sizes)]
        return DataLoader(data, batch_sampler=[[number % len(data) for number in batch] for batch in batches])


class LosesFour(ScheduledOperator):
    """Of seven ranks four die in the third step, when all of them are in it. The loader has the global batch."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def make_loader(self, data: TensorDataset, shuffle: bool = False) -> Any:
        return DataLoader(data, batch_size=self.config[BATCH_SIZE], shuffle=shuffle)

    def prepare_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        if self.world_size == 7 and self.world_rank in FOUR and len(self.seen) == 2:
            folder = Path(self.config["folder"])
            (folder / str(self.world_rank)).touch()
            while len(list(folder.iterdir())) < len(FOUR):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prepare_batch(batch)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.promise("The step of one process")
@pytest.mark.parametrize(
    ("operator_cls", "cap", "size"),
    [
        (LinearOperator, None, 18),
        (LinearOperator, None, 17),
        (LinearOperator, 4, 17),
        (LinearOperator, None, 1),
        (OwnBatchOperator, None, 17),
        (InBuckets, None, 1),
        (InBuckets, 2, 1),
    ],
)
def test_two_workers_take_the_steps_of_one_process(
    operator_cls: type[LinearOperator], cap: int | None, size: int, two: TorchTrainer
) -> None:
    config = {**JOINT, "batch_size": size}
    calls = (("train", 2), ("train", None), ("validate", None))
    together = run_together(two, Experiment(operator_cls, config, calls, {"batch_options": BatchOptions(True, cap)}))
    alone = run_alone(Experiment(operator_cls, config, calls))
    assert_close(together.model[0], alone.model[0])
    assert_close(together.model[1], alone.model[0])
    for found, expected in zip(together.results, alone.results, strict=True):
        assert found["num_samples"] == expected["num_samples"]
    assert together.results[2]["val_loss"] == pytest.approx(alone.results[2]["val_loss"])


def test_the_training_is_the_same_whatever_dies(ray_cluster: None, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "training_operator_cls": LosesFour,
        "config": {BATCH_SIZE: 18, "folder": str(tmp_path), "num_samples": 180, "shuffle": True, "optimizer": "adam"},
        "split_batches": True,
        "scheduler_step_freq": "batch",
        "seed": 3,
        "use_gpu": False,
    }
    with TorchTrainer(**options, use_local=True) as trainer:
        trainer.train()
        one = trainer.state_dict()
    several_workers: dict[str, Any] = {"num_workers": 7, "num_cpus_per_worker": 0.25, "micro_batch_size": 4}
    with TorchTrainer(
        recovery=Recovery(wait_for_workers=False, resize_interval_s=600.0),
        **options,
        **several_workers,
    ) as trainer:
        testing.kill_worker(trainer, 1, at="step:7")
        trainer.train()
        data, several = trainer.status().data, trainer.state_dict()
        # Whether a worker has come by the second loss that takes the place of the lost one is a matter of time.
        sizes = [event.new_size for event in controller_of(trainer).history.events if event.is_failure]
        assert sizes == [3, trainer.num_workers]
        assert (2 <= trainer.num_workers < 7, trainer.config[BATCH_SIZE]) == (True, 18)
        assert data is not None
        assert (data.due, data.used) == (180, 180)
    assert_close(several["models"], one["models"])
    assert several["schedulers"][0]["last_epoch"] == one["schedulers"][0]["last_epoch"] == 10
    assert_close(several["optimizers"][0]["param_groups"][0]["lr"], one["optimizers"][0]["param_groups"][0]["lr"])


@pytest.mark.parametrize(("size", "num_samples"), [(16, 3), (2, 4)])
def test_batch_norms_train_where_shares_leave_a_worker_without_samples(
    size: int, num_samples: int, two: TorchTrainer
) -> None:
    config = {"num_samples": num_samples, "batch_size": size}
    calls = (("train", None), ("train", None))
    together = run_together(two, Experiment(BatchNormOperator, config, calls, {"batch_options": BatchOptions(True)}))
    alone = run_alone(Experiment(BatchNormOperator, config, calls))
    assert_close(together.model[0], alone.model[0])
    weights = [{name: tensor for name, tensor in model.items() if "1." not in name} for model in together.model]
    assert_close(weights[1], weights[0])


class Gathers(LinearOperator):
    """Gathers the output of all workers for its loss."""

    def forward(self, features: Any, target: Any) -> tuple[Any, ...]:
        output = self.model(*features)
        shown = self.to_gather(output.detach())
        dist.all_gather([torch.empty_like(shown) for _ in range(self.world_size)], shown)
        return output, self.criterion(output, target)

    def to_gather(self, shown: torch.Tensor) -> torch.Tensor:
        return shown


class GathersOneSize(Gathers):
    def to_gather(self, shown: torch.Tensor) -> torch.Tensor:
        return torch.cat([shown, shown.new_zeros(16 - len(shown), 1)])


def test_a_loss_that_gathers_shares_of_different_sizes_is_told_so(two: TorchTrainer) -> None:
    uneven, even = {"num_samples": 35, "batch_size": 16}, {"num_samples": 32, "batch_size": 16}
    kinds: list[tuple[type[LinearOperator], dict[str, int]]] = [(GathersOneSize, uneven), (Gathers, even)]
    joint = {"batch_options": BatchOptions(True)}

    def outcome(operator: Any) -> str:
        world = World(operator.world_rank, operator.world_size)
        for operator_cls, sizes in kinds:
            Experiment(operator_cls, sizes, options=joint).run_in(world)
        with pytest.raises(ValueError, match="different sizes") as caught:
            Experiment(Gathers, uneven, options=joint).run_in(world)
        return str(caught.value)

    for words in two.apply_all_operators(outcome):
        assert "from 2 to 3 elements, because their shares of this global batch differ" in words
        assert "`drop_last=True`" in words


class Streams(LinearOperator):
    """Registers a loader that is not divided."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        return [data[at : at + 4] for at in range(0, len(data), 4)]


NEEDS_DIVISION: list[dict[str, Any]] = [{"split_batches": True}, {"deterministic": True}]
NEEDS_PARTS: list[dict[str, Any]] = [{"deterministic": True}, {"split_batches": True, "micro_batch_size": 2}]


@pytest.mark.parametrize("option", NEEDS_DIVISION, ids=str)
def test_a_loader_that_is_not_divided_is_refused(option: dict[str, Any]) -> None:
    [name] = option
    with pytest.raises(ValueError, match=rf"`{name}=.*` needs train data that the library divides.*not a torch DataL"):
        TorchTrainer(training_operator_cls=Streams, **option, use_local=True)


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Has no positions by which it could be divided."""

    def __iter__(self) -> Iterator[Any]:
        return iter(dataset(8))


@pytest.mark.parametrize("option", NEEDS_PARTS, ids=str)
def test_data_of_a_call_that_are_not_divided_are_refused(
    option: dict[str, Any], make_local: Callable[..., TorchTrainer]
) -> None:
    trainer = make_local(**option)
    with pytest.raises(
        ValueError, match=r"needs data that the library shards by samples, but this data is not sharded"
    ):
        trainer.train(dataset=torch.utils.data.DataLoader(Streamed()))
    (name, value), *_ = option.items()
    with pytest.raises(ValueError, match=rf"got `Dataset`, which `{name}=.*{value}.*` cannot shard by samples"):
        trainer.train(dataset=Dataset(list(range(8)), batch_size=2))


def test_one_worker_takes_global_batches_of_a_call_as_they_are(make_local: Callable[..., TorchTrainer]) -> None:
    trainer = make_local(split_batches=True)
    assert trainer.train(dataset=torch.utils.data.DataLoader(Streamed(), 3))["num_samples"] == 8
    rows = [tuple(part[None] for part in sample) for sample in dataset(8)]
    assert trainer.train(dataset=Dataset(rows, batch_size=2), num_steps=3)["num_samples"] == 6


class OwnCapped(OwnBatchOperator):
    pass


def test_a_cap_without_effect_is_refused() -> None:
    trainer = TorchTrainer(training_operator_cls=OwnCapped, split_batches=True, micro_batch_size=2, use_local=True)
    with (
        trainer,
        pytest.raises(
            ValueError, match=r"`micro_batch_size`: a batch was skipped, but `self.backward` was not called for it"
        ),
    ):
        trainer.train()
