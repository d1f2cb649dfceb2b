"""Data for one call of a `TFTrainer`, and `predict`, with one worker in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raysgd.data import Arrays
from raysgd.tf import TFTrainer
from raysgd.tf.data import sources
from tests.tf.models import Line, make_data, make_model, samples

X, Y = samples(21)
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(y=Y[:, 0])


def batched(config: Any = None, batch_size: Any = 4) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)


@pytest.fixture(scope="module")
def trainer() -> Iterator[TFTrainer]:
    with TFTrainer(training_operator_cls=Line, use_local=True, seed=1, config={"batch_size": 4}) as made:
        yield made


@pytest.mark.long
def test_a_call_with_data_of_its_own_is_as_one_with_registered_data(trainer: TFTrainer) -> None:
    arrays = Arrays((X, Y), batch_size=4), Arrays(FRAME, feature_columns=list("abcd"), label_column=["y"])
    state = trainer.state_dict()
    expected = [trainer.train(), trainer.validate(dataset=batched())]
    for data in ((X, Y), *arrays, batched(), batched):
        trainer.load_state_dict(state)
        found = [trainer.train(dataset=data), trainer.validate(dataset=data)]
        assert found[0]["num_samples"] == found[1]["num_samples"] == 21
        assert found[0]["train_loss"] == pytest.approx(expected[0]["train_loss"], abs=1e-6)
        assert found[1]["val_loss"] == pytest.approx(expected[1]["val_loss"], abs=1e-6)


def test_calls_with_the_same_object_go_on_where_the_last_one_stopped(trainer: TFTrainer) -> None:
    for data in ((X, Y), batched()):
        assert [trainer.train(num_steps=4, dataset=data)["num_samples"] for _ in range(3)] == [16, 13, 13]
        assert trainer.train(num_steps=6, dataset=data)["num_samples"] == 21


def test_other_data_are_refused(trainer: TFTrainer) -> None:
    with pytest.raises(TypeError, match=r"`dataset=` got `int`: need a `tf.data.Dataset`"):
        trainer.train(dataset=3)
    with pytest.raises(ValueError, match=r"`Arrays\(transform=...\)` with a `TFTrainer` cannot work"):
        trainer.train(dataset=Arrays((X, Y), transform=print))
    with pytest.raises(TypeError, match="what the creator in `dataset=` returned"):
        trainer.train(dataset=lambda config, batch_size: 3)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_float64_becomes_what_keras_computes_with(kind: str) -> None:
    """Also where a call is made of arrays in the driver: the worker says it, which has the model."""
    import tensorflow as tf

    def make(config: Any) -> Any:
        tf.keras.backend.set_floatx(kind)
        return make_model(config)

    rows = np.random.default_rng(1).standard_normal((7, 4))
    before = tf.keras.backend.floatx()
    share = sources.call_data_of(Arrays((rows, rows[:, 0]), batch_size=4), {}, 1, travels=True)
    assert share is not None
    try:
        with TFTrainer(make, make_data, use_local=True, config={"num_samples": 8}) as trainer:
            expected = trainer.get_model().predict(rows, verbose=0)
            for data in (rows, tf.constant(rows), pd.DataFrame(rows)):
                found = trainer.predict(data)
                values = found["prediction"].to_numpy() if isinstance(data, pd.DataFrame) else found[:, 0]
                np.testing.assert_allclose(values, expected[:, 0], atol=1e-12 if kind == "float64" else 1e-6)
            batch = next(iter(sources.batches_of(share, is_distributed=False)))
            assert {part.dtype.name for part in batch} == {kind}
    finally:
        tf.keras.backend.set_floatx(before)


def test_creators_evaluate_other_data_and_train_on_their_own() -> None:
    with TFTrainer(make_model, make_data, use_local=True, seed=1, config={"num_test_samples": 9}) as trainer:
        before = trainer.validate()
        model = trainer.get_model()
        expected = model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
        assert trainer.validate(dataset=batched())["validation_loss"] == pytest.approx(expected, abs=1e-6)
        assert trainer.validate() == before
        with pytest.raises(ValueError, match="`fit` trains on what `data_creator` returns"):
            trainer.train(dataset=(X, Y))
        assert np.abs(trainer.predict(X) - model.predict(X, verbose=0)).max() < 1e-6


def test_predictions_are_those_of_the_model(trainer: TFTrainer) -> None:
    import tensorflow as tf

    expected = trainer.get_model()(X, training=False).numpy()
    for data in (X, tf.constant(X), batched(), batched().map(lambda x, y: x), iter([X[:5], X[5:]]), Arrays((X, Y))):
        found = trainer.predict(data, batch_size=4)
        assert isinstance(found, np.ndarray)
        assert np.abs(found - expected).max() < 1e-6
    assert np.abs(trainer.predict(FRAME[list("abcd")])["prediction"].to_numpy() - expected[:, 0]).max() < 1e-6
    assert [len(part) for part in trainer.predict(batched(), streaming=True)] == [4, 4, 4, 4, 4, 1]
    with pytest.raises(ValueError, match=r"a shuffled `tf.data.Dataset`"):
        trainer.predict(batched().shuffle(3))
    with pytest.raises(TypeError, match="`predict` got a `int`"):
        trainer.predict(3)
