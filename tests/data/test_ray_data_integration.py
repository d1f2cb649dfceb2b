"""Datasets of Ray Data in trainings of several workers.

Starting Ray Data costs a second or two each time, so a few trainings tell all.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import TorchTrainer, TrainingOperator
from raysgd.data import Dataset, RayBatches
from raysgd.utils import BATCH_SIZE
from tests.helpers.run_if import RunIf

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster"), RunIf(modules=["pandas", "pyarrow"])]

NUM_ROWS = 11
NUM_TO_VALIDATE = 5


def rows(number: int) -> list[dict[str, float]]:
    return [{"id": index, "x": index / number, "y": 2.0 * index / number} for index in range(number)]


def dataset_of(number: int) -> Any:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.from_items(rows(number), override_num_blocks=3)


class OfRayData(TrainingOperator):
    """A line through the rows of a dataset; notes which rows it sees."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer = self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
        self.seen: list[list[int]] = []
        if "data" in config:
            train, validation = config["data"]
            self.register_data(train_loader=train, validation_loader=RayBatches(validation, batch_size=2))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.lose_a_worker(batch_info)
        self.seen.append(batch["id"].tolist())
        x, y = batch["x"].unsqueeze(1), batch["y"].unsqueeze(1)
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.backward(loss)
        self.optimizer_step()
        return {"train_loss": loss.item(), "num_samples": len(x)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"].float().mean().item(), "num_samples": len(batch["id"])}

    def lose_a_worker(self, batch_info: dict[str, Any]) -> None:
        told = self.config.get("lose_a_worker")
        place = (self.world_rank, batch_info["epoch_idx"], batch_info["batch_idx"])
        if told and place == (1, 0, 1) and not os.path.exists(told):
            Path(told).touch()
            os._exit(1)


def alone(batch_size: int) -> torch.nn.Linear:
    """What one process makes of the same rows, with the batch of all workers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (torch.tensor([[row[name]] for row in rows(NUM_ROWS)]) for name in ("x", "y"))
    for start in range(0, NUM_ROWS, batch_size):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[start : start + batch_size]), y[start : start + batch_size]).backward()
        optimizer.step()
    return model


def seen_by(trainer: TorchTrainer) -> list[list[list[int]]]:
    """The rows in each batch of each worker since the last time."""

    def take(operator: Any) -> list[list[int]]:
        seen, operator.seen = operator.seen, []
        return list(seen)

    return trainer.apply_all_operators(take)


def weights_of(model: Any) -> list[float]:
    return [round(parameter.item(), 5) for parameter in model.parameters()]


def test_registered_data_is_divided_without_a_loss(tmp_path: Path) -> None:
    config = {
        BATCH_SIZE: 4,
        "data": (dataset_of(NUM_ROWS), dataset_of(NUM_TO_VALIDATE)),
        "lose_a_worker": str(tmp_path / "lost"),
    }
    with TorchTrainer(training_operator_cls=OfRayData, num_workers=2, use_gpu=False, config=config) as trainer:
        result = trainer.train()  # loses a worker, and begins its epoch again
        assert (result["num_samples"], result["epoch"]) == (NUM_ROWS, 1)
        assert os.path.exists(config["lose_a_worker"])
        assert seen_by(trainer) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
        assert weights_of(trainer.get_model()) == weights_of(alone(batch_size=4))

        assert trainer.train(num_steps=2)["num_samples"] == 8
        assert trainer.train(num_steps=2)["num_samples"] == 7  # the rest of the pass, and the first batches of the next
        assert seen_by(trainer) == [[[0, 1], [4, 5], [8, 9], [0, 1]], [[2, 3], [6, 7], [10], [2, 3]]]

        assert trainer.validate(num_steps=1)["num_samples"] == 4
        result = trainer.validate()
        assert (result["num_samples"], result["id"]) == (NUM_TO_VALIDATE, 2.0)


class Identity(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"]),
            criterion=torch.nn.MSELoss(),
        )


def pair_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[number / 6400]]), torch.tensor([[number / 6400]])


@pytest.mark.promise("Ray Data")
def test_a_call_brings_its_own_data() -> None:
    numbers = random.Random(0).sample(range(6400), 6400)
    pairs = Dataset(numbers, batch_size=32, download_func=pair_of, max_concurrency=1)
    options: dict[str, Any] = {"num_workers": 2, "use_gpu": False, "config": {"lr": 0.02}}
    with TorchTrainer(training_operator_cls=Identity, **options) as trainer:
        results = [trainer.train(dataset=pairs, num_steps=100) for _ in range(5)]
        assert [result["epoch"] for result in results] == [1, 2, 3, 4, 5]
        assert all(result["num_samples"] == 6400 for result in results)
        prediction = trainer.get_model()(torch.tensor([[0.5]])).item()
        assert 0.4 <= prediction <= 0.6

        batches = RayBatches(dataset_of(NUM_ROWS), batch_size=2, feature_columns=["x"], label_column=["y"])
        assert trainer.train(dataset=batches, num_steps=2)["num_samples"] == 8
        assert trainer.train(dataset=batches, num_steps=1)["num_samples"] == 3
        assert trainer.train(dataset=batches)["num_samples"] == NUM_ROWS
        assert trainer.validate(dataset=batches)["num_samples"] == NUM_ROWS
        with pytest.raises(ValueError, match="has no batch size"):
            trainer.train(dataset=dataset_of(NUM_ROWS))
