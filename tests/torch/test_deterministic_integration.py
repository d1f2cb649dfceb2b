"""The same bits, whatever happens to workers."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from raysgd import testing
from raysgd.replicas.batch_options import BatchOptions
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.torch.lab import Experiment, run_alone
from tests.torch.operators_for_tests import LinearOperator, OwnBatchOperator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SHARDS: dict[str, Any] = {"batch_options": BatchOptions(deterministic=True, num_shards=4)}


class Noisy(Dataset[Any]):
    """Numbers with noise of three kinds of generators."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(4) + np.random.rand() + random.random()
        return noise + index / 90, torch.tensor([index / 90])


class Random(TrainingOperator):
    """Dropout, and noise in a process of the loader."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters(), lr=0.01), criterion=torch.nn.MSELoss()
        )
        num_processes = config.get("num_processes", 0)
        self.register_data(train_loader=DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=num_processes))


def digest(trainer: TorchTrainer) -> str:
    weights = trainer.get_model(to_cpu=True).parameters()
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).hexdigest()


def test_kills_change_no_bit_of_the_weights(ray_cluster: None) -> None:
    options: dict[str, Any] = {"training_operator_cls": Random, "deterministic": True, "seed": 4, "use_gpu": False}
    options |= {"num_workers": 4, "num_cpus_per_worker": 0.5, "config": {"num_processes": 1}}
    with TorchTrainer(**options) as trainer:
        trainer.train()
        undisturbed = digest(trainer)
    with TorchTrainer(**options, resize_check_s=600.0) as trainer:
        testing.kill_worker(trainer, 3, at="step:1")
        testing.kill_worker(trainer, [1, 2], at="step:5")
        trainer.train(num_steps=6)
        assert trainer.num_workers == 1
        assert trainer.train()["epoch"] == 1
        assert trainer.num_workers == 4
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


def test_gradients_past_the_library_are_refused() -> None:
    with pytest.raises(ValueError, match="computed its gradients without the library"):
        run_alone(Experiment(OwnBatchOperator, options=SHARDS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "speed", "joint_batch": "constant"}, '`deterministic=True` with `balance="speed"`'),
        ({"accumulate_grad_batches": 2}, "cannot work with `accumulate_grad_batches=2`"),
        ({"parallel": "fsdp"}, '`deterministic=True` cannot work with `parallel="fsdp"`'),
        ({"add_dist_sampler": False}, "`deterministic=True` cannot work with `add_dist_sampler=False`"),
        ({"deterministic": "yes"}, "need True or False"),
    ],
)
def test_what_cannot_be_repeated_is_refused_before_workers_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchTrainer(training_operator_cls=LinearOperator, num_workers=2, **{"deterministic": True, **options})
