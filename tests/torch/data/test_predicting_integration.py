"""`TorchTrainer.predict` on several workers, and what follows when one dies in it.

Covers `raysgd.trainer.driver.calls`: there are no rounds to divide without workers.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.data import RayBatches
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.trainer.driver.calls import next_round_size

pytestmark = pytest.mark.integration

X = np.random.default_rng(0).standard_normal((101, 3)).astype(np.float32)


class Net(TrainingOperator):
    """Batch norm, whose statistics the workers have to share; one worker dies where it is told to."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        data = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
        self.register_data(train_loader=DataLoader(data, batch_size=4))

    def predict_batch(self, batch: Any, batch_info: Any) -> Any:
        flag = batch_info.get("flag")
        if batch_info["batch_idx"] == 9 and flag is not None and os.path.exists(flag):
            os.remove(flag)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict_batch(batch, batch_info)


def expected_of(trainer: TorchTrainer) -> Any:
    with torch.no_grad():
        return trainer.get_model(to_cpu=True).eval()(torch.from_numpy(X)).numpy()


def check_sizes(trainer: TorchTrainer, expected: Any) -> None:
    """Fewer rows than workers, and rows that do not divide evenly, cut by the driver or loaded by the workers."""
    for num_rows in (0, 1, 2, 10, 101):
        found = trainer.predict(X[:num_rows], batch_size=4)
        assert len(found) == num_rows
        assert num_rows == 0 or np.abs(found - expected[:num_rows]).max() < 1e-6
    loader = DataLoader(TensorDataset(torch.from_numpy(X)), batch_size=4, num_workers=1)
    assert np.abs(trainer.predict(loader).numpy() - expected).max() < 1e-6


def check_ray_data(trainer: TorchTrainer, expected: Any) -> None:
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([dict(zip("abc", map(float, row), strict=True)) for row in X[:30]])
    batches = RayBatches(rows, batch_size=7, feature_columns=["a", "b", "c"], label_column="c")
    found = trainer.predict(batches).take_batch(30)["prediction"]
    assert np.abs(np.stack(list(found)) - expected[:30]).max() < 1e-6


def check_loss(trainer: TorchTrainer, expected: Any, flag: Path) -> None:
    """The worker that has batch 9 dies in it; the round is repeated."""
    flag.touch()
    data = TensorDataset(torch.from_numpy(X))
    stream = trainer.predict(data, batch_size=4, streaming=True, info={"flag": str(flag)})
    found = [next(stream) for _ in range(5)]
    found += list(stream)
    assert not flag.exists()
    assert len(found) == 26
    assert np.abs(torch.cat(found).numpy() - expected).max() < 1e-6


@pytest.mark.promise("Prediction")
def test_three_workers_give_the_results_of_one_process_also_when_one_dies(ray_cluster: None, tmp_path: Path) -> None:
    with TorchTrainer(training_operator_cls=Net, num_workers=3, timeout_s=60) as trainer:
        trainer.train()
        state, expected = trainer.state_dict(), expected_of(trainer)
        check_sizes(trainer, expected)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            trainer.predict(X[:, :2])
        check_ray_data(trainer, expected)
        check_loss(trainer, expected, tmp_path / "armed")
        assert trainer._num_failures == 1
        after = trainer.state_dict()
        assert after["epoch"] == state["epoch"]
        assert all(torch.equal(after["models"][0][name], value) for name, value in state["models"][0].items())
        assert trainer.train()["num_samples"] == 24


def test_rounds_are_long_enough_and_fit_in_memory() -> None:
    size = 1
    for _ in range(20):
        size = next_round_size(size, seconds=0.01, num_bytes=1, num_batches=1, num_workers=2)
    assert size == 1024
    assert next_round_size(1024, seconds=0.5, num_bytes=2**20, num_batches=2, num_workers=4) == 32
    assert next_round_size(32, seconds=5.0, num_bytes=1, num_batches=1, num_workers=4) == 16
    assert next_round_size(16, seconds=5.0, num_bytes=2**40, num_batches=1, num_workers=4) == 1
