"""Streams as data of operators of TensorFlow: each row once, with any number of workers, and predictions in order.

Covers `raysgd.tf.data.batch_streams`: operators reach it through `register_data`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd import Recovery, testing
from raysgd.engine.shared.types import World
from raysgd.exceptions import InvalidRegistrationError
from raysgd.streams.stream import Pipeline
from raysgd.tf import TFTrainer, TrainingOperator
from raysgd.tf.operator.internals import OperatorContext, TFSettings
from tests.streams.made import MadeStream

pytestmark = pytest.mark.integration

NUM_ROWS = {"known": 600, "filtered": 480}


def as_sample(row: tuple[str, int]) -> tuple[Any, Any]:
    number = 15 * int(row[0][6:]) + row[1]
    features = np.random.default_rng(number).normal(size=4)
    return features, np.array([np.sin(features.sum()) + number % 5])


def stream_of(kind: str, num_loaders: int = 0) -> Pipeline:
    source = MadeStream([15] * 40, is_known=kind == "known").shuffle(128)
    kept = source if kind == "known" else source.filter(lambda row: row[1] % 5 != 0)
    return kept.map(as_sample).batch(25, num_workers=num_loaders)


class StreamOperator(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1, kernel_initializer="ones")])
        self.model, self.optimizer, self.loss = self.register(
            models=model, optimizers=tf.keras.optimizers.SGD(0.1), loss=tf.keras.losses.MeanSquaredError()
        )
        stream = stream_of(config["kind"], config["num_loaders"])
        self.register_data(train_dataset=stream, validation_dataset=stream)


def trainer_of(kind: str, num_workers: int, **options: Any) -> TFTrainer:
    return TFTrainer(
        training_operator_cls=StreamOperator,
        config={"kind": kind, "num_loaders": 1 if num_workers > 1 else 0},
        num_replicas=num_workers,
        num_cpus_per_worker=0.25,
        split_batches=True,
        seed=3,
        use_local=num_workers == 1,
        **options,
    )


@pytest.mark.parametrize("kind", ["known", pytest.param("filtered", marks=pytest.mark.soak)])
def test_the_training_is_the_same_whatever_dies_and_with_any_number_of_workers(
    ray_cluster: None, kind: str, tmp_path: Path
) -> None:
    with trainer_of(kind, 1) as trainer:
        assert trainer.train()["num_samples"] == NUM_ROWS[kind]
        trainer.train(num_steps=5, dataset=stream_of(kind))
        assert trainer.train(dataset=stream_of(kind))["num_samples"] == NUM_ROWS[kind]
        alone = trainer.get_model().get_weights()
        rows = MadeStream([15] * 40).map(as_sample).batch(64)
        assert len(trainer.predict(rows)) == 600
    with trainer_of(kind, 3, recovery=Recovery(wait_for_workers=False, resize_interval_s=600.0)) as trainer:
        testing.kill_worker(trainer, 1, at="step:5")
        trainer.train(num_steps=9)
        trainer.save(tmp_path / "checkpoint")
    with trainer_of(kind, 2) as trainer:
        trainer.load(tmp_path / "checkpoint")
        trainer.train()
        data = trainer.status().data
        assert data.used == NUM_ROWS[kind]
        assert trainer.validate()["num_samples"] == NUM_ROWS[kind]
        trainer.train(num_steps=5, dataset=stream_of(kind))
        trainer.train(dataset=stream_of(kind))
        several = trainer.get_model().get_weights()
    for own, other in zip(alone, several, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def test_a_stream_needs_a_constant_global_batch() -> None:
    context = OperatorContext(TFSettings(StreamOperator, {}, 3), World(0, 1))
    with pytest.raises(InvalidRegistrationError, match="pass `split_batches=True`"):
        StreamOperator({"kind": "known", "num_loaders": 0}, context)
