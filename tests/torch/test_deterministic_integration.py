"""The same bits, whatever happens to workers."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from raysgd import Recovery, testing
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.trainer.configuration import BatchOptions
from tests.torch.lab import Experiment, run_alone
from tests.torch.operators_for_tests import LinearOperator, OwnBatchOperator

pytestmark = pytest.mark.integration

SHARDS: dict[str, Any] = {"batch_options": BatchOptions(deterministic=True, num_shards=4)}


class Noisy(Dataset[Any]):
    """Numbers with noise of three kinds of generators."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(4) + np.random.rand() + random.random()
        return noise + index / self.num_samples, torch.tensor([index / self.num_samples])


class Random(TrainingOperator):
    """Dropout, and noise in a process of the loader."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters(), lr=0.01), criterion=torch.nn.MSELoss()
        )
        data, num_processes = Noisy(config.get("num_samples", 90)), config.get("num_processes", 0)
        self.register_data(train_loader=DataLoader(data, batch_size=2, shuffle=True, num_workers=num_processes))


OPTIONS: dict[str, Any] = {
    "training_operator_cls": Random,
    "deterministic": True,
    "seed": 4,
    "use_gpu": False,
    "num_cpus_per_worker": 0.5,
}


def digest(trainer: TorchTrainer) -> str:
    weights = trainer.get_model(to_cpu=True).parameters()
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).hexdigest()


def test_kills_change_no_bit_of_the_weights(ray_cluster: None) -> None:
    options = {**OPTIONS, "num_workers": 3, "config": {"num_processes": 1}}
    with TorchTrainer(recovery=Recovery(wait_for_workers=False, resize_interval_s=600.0), **options) as trainer:
        before = trainer.state_dict()
        trainer.train()
        undisturbed = digest(trainer)
        trainer.load_state_dict(before)
        testing.kill_worker(trainer, 2, at="step:1")
        testing.kill_worker(trainer, 0, at="step:4")
        trainer.train(num_steps=6)
        first, second = (event.new_size for event in trainer.status().events if event.is_failure)
        assert (first, second in (1, 2)) == (2, True), "2 if a new worker came before the second loss"
        assert trainer.train()["epoch"] == 1
        assert trainer.num_workers == 3
        assert digest(trainer) == undisturbed


def test_processes_of_a_loader_draw_what_the_replica_would_draw() -> None:
    found = [run_alone(Experiment(Random, {"num_processes": num}, options={**SHARDS, "seed": 1})) for num in (0, 1)]
    for name, weight in found[0].model[0].items():
        assert torch.equal(weight, found[1].model[0][name])


def test_shards_make_the_step_of_one_process() -> None:
    config = {"num_samples": 45, "batch_size": 4}
    by_shards = run_alone(Experiment(LinearOperator, config, options=SHARDS))
    whole = run_alone(Experiment(LinearOperator, {**config, "batch_size": 16}))
    torch.testing.assert_close(by_shards.model[0], whole.model[0], rtol=1e-6, atol=1e-6)


class Weighing(LinearOperator):
    """Says how much a batch counts."""

    def forward(self, features: Any, target: Any) -> tuple[Any, ...]:
        return *super().forward(features, target), 2.0


class OfTwo(LinearOperator):
    """Two optimizers."""

    def register(self, **parts: Any) -> Any:
        parameters = parts["models"].parameters()
        parts["optimizers"] = [torch.optim.SGD([each], lr=0.1) for each in parameters]
        return super().register(**parts)


@pytest.mark.parametrize(
    ("operator_cls", "message"),
    [
        (OwnBatchOperator, "computed gradients without `self.backward`"),
        (Weighing, r"`weight=` of `self.backward`.* does not work with `deterministic=True`"),
        (OfTwo, "`deterministic=True` with 2 registered optimizers cannot work"),
    ],
)
def test_steps_that_cannot_be_repeated_are_refused(operator_cls: type[TrainingOperator], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_alone(Experiment(operator_cls, options=SHARDS))
