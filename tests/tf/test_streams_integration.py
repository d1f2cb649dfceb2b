"""Streams and datasets of Ray Data in operators of TensorFlow: each row once, with any number of workers.

Covers `raysgd.tf.data.sources`: operators reach it through `register_data`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd import Recovery, testing
from raysgd.core.engine.shared.types import World
from raysgd.data import RayBatches
from raysgd.exceptions import InvalidRegistrationError
from raysgd.streams.stream import Pipeline
from raysgd.tf import TFTrainer
from raysgd.tf.training_operator import OperatorContext, TFSettings
from tests.helpers.run_if import RunIf
from tests.streams.made import MadeStream
from tests.tf.models import Line

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


class StreamOperator(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
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


# ------------------------------------------------------------------------------------------------ Ray Data

NUM_OF_RAY = 11


def rows(batch_size: int) -> Any:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{"a": number / NUM_OF_RAY, "b": 1.0, "c": -1.0, "d": 0.5, "y": number / 5} for number in range(NUM_OF_RAY)]
    dataset = ray.data.from_items(items, override_num_blocks=3)
    return RayBatches(dataset, batch_size, feature_columns=list("abcd"), label_column=["y"])


class OnRows(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_dataset=config["rows"], validation_dataset=config["rows"])


def trained(num_workers: int, batch_size: int) -> tuple[list[Any], list[Any]]:
    """Numbers of samples, and the weights in the end."""
    options: dict[str, Any] = {"num_workers": num_workers, "seed": 3, "config": {"rows": rows(batch_size)}}
    with TFTrainer(training_operator_cls=OnRows, use_local=num_workers == 1, **options) as trainer:
        results = [trainer.train(), trainer.train(num_steps=2), trainer.train(num_steps=2)]
        results += [trainer.validate(), trainer.validate(num_steps=1), trainer.validate(num_steps=9)]
        [weights, *_] = trainer.apply_all_operators(lambda operator: operator.model.get_weights())
    return [result["num_samples"] for result in results], weights


@RunIf(modules=["pandas", "pyarrow"])
def test_one_worker_reads_all_rows(ray_cluster: None) -> None:
    assert trained(1, batch_size=4)[0] == [11, 8, 7, 11, 4, 11]


@pytest.mark.soak
@RunIf(modules=["pandas", "pyarrow"])
def test_two_workers_have_the_numbers_of_one(ray_cluster: None) -> None:
    numbers, weights = trained(2, batch_size=2)
    expected_numbers, expected = trained(1, batch_size=4)
    assert numbers == expected_numbers
    for mine, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
