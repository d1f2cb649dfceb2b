"""Datasets of Ray Data in TensorFlow's operators: on two workers the numbers of one, without a row lost.

Covers `raysgd.tf.data.ray_dataset`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raysgd.data import RayBatches
from raysgd.tf import TFTrainer, TrainingOperator
from tests.helpers.run_if import RunIf

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster"), RunIf(modules=["pandas", "pyarrow"])]

NUM_ROWS = 11


@pytest.fixture(autouse=True)
def quiet_ray_data(ray_cluster: None) -> Iterator[None]:
    """No progress bars."""
    import ray.data

    context = ray.data.DataContext.get_current()
    before, context.enable_progress_bars = context.enable_progress_bars, False
    yield
    context.enable_progress_bars = before


def rows(batch_size: int) -> Any:
    import ray.data

    items = [{"a": number / NUM_ROWS, "b": 1.0, "y": number / 5} for number in range(NUM_ROWS)]
    dataset = ray.data.from_items(items, override_num_blocks=3)
    return RayBatches(dataset, batch_size, feature_columns=["a", "b"], label_column=["y"])


class OnRows(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        self.model, self.optimizer, self.loss = self.register(
            models=model, optimizers=tf.keras.optimizers.SGD(0.1), loss=tf.keras.losses.MeanSquaredError()
        )
        self.register_data(train_dataset=config["rows"], validation_dataset=config["rows"])


def trained(num_workers: int, batch_size: int) -> tuple[list[Any], list[Any]]:
    """Numbers of samples, and the weights in the end."""
    options: dict[str, Any] = {"num_workers": num_workers, "seed": 3, "config": {"rows": rows(batch_size)}}
    with TFTrainer(training_operator_cls=OnRows, use_local=num_workers == 1, **options) as trainer:
        results = [trainer.train(), trainer.train(num_steps=2), trainer.train(num_steps=2)]
        results += [trainer.validate(), trainer.validate(num_steps=1), trainer.validate(num_steps=9)]
        [weights, *_] = trainer.apply_all_operators(lambda operator: operator.model.get_weights())
    return [result["num_samples"] for result in results], weights


def test_one_worker_reads_all_rows() -> None:
    numbers, weights = trained(1, batch_size=4)
    assert numbers == [11, 8, 7, 11, 4, 11]
    assert [weight.shape for weight in weights] == [(2, 1), (1,)]


@pytest.mark.soak
def test_two_workers_have_the_numbers_of_one() -> None:
    numbers, weights = trained(2, batch_size=2)
    expected_numbers, expected = trained(1, batch_size=4)
    assert numbers == expected_numbers
    for mine, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
