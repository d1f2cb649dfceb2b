"""What the library keeps about an operator of TensorFlow, out of reach of its attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raysgd.engine.shared.types import World
from raysgd.tf.operator.internals import OperatorContext, TFSettings
from raysgd.tf.training_operator import TrainingOperator
from tests.helpers.lazily import imported

tf = imported("tensorflow")


class Line(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1, kernel_initializer="ones")])
        self.model, self.optimizer, self.loss, self.metric = self.register(
            models=model,
            optimizers=tf.keras.optimizers.SGD(0.1),
            loss=tf.keras.losses.MeanSquaredError(),
            metrics=tf.keras.metrics.MeanAbsoluteError(name="error"),
        )
        x = np.linspace(0, 1, 8, dtype="float32").reshape(-1, 1)
        self.data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
        self.register_data(train_dataset=self.data)


def make(operator_cls: type[TrainingOperator]) -> Any:
    return operator_cls({}, OperatorContext(TFSettings(operator_cls, {}, seed=0), World(rank=0, size=1)))


def test_the_record_is_what_was_registered() -> None:
    operator = make(Line)
    registered = operator._raysgd.registered
    assert (operator._models, operator._optimizers) == ([operator.model], [operator.optimizer])
    assert (registered.loss, registered.metrics) == (operator.loss, [operator.metric])
    assert (operator.train_dataset, operator.validation_dataset) == (operator.data, None)


@pytest.mark.parametrize("name", ["_models", "_optimizers", "_config"])
def test_an_assignment_to_a_name_of_the_record_is_refused(name: str) -> None:
    class Careless(Line):
        def setup(self, config: dict[str, Any]) -> None:
            setattr(self, name, {"mine": 1})

    with pytest.raises(AttributeError, match=rf"`self\.{name}` belongs to the library"):
        make(Careless)


def test_any_other_private_name_is_free() -> None:
    names = ["_context", "_loss", "_metrics", "_train_dataset", "_sharding", "_train_function", "_trained", "_count"]

    class Careless(Line):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            for name in names:
                setattr(self, name, "mine")

    result = make(Careless).train_epoch(make(Line).data)
    assert result == pytest.approx(make(Line).train_epoch(make(Line).data))
    assert {"train_loss", "train_error", "num_samples"} <= result.keys()


def test_steps_are_traced_again_when_other_variables_are_trained() -> None:
    operator = make(Line)
    operator.train_epoch(operator.data)
    traced = operator._raysgd.train_function
    operator.train_epoch(operator.data)
    assert operator._raysgd.train_function is traced
    operator.model.layers[0].trainable = False
    operator._raysgd.forget_stale_steps()
    assert operator._raysgd.train_function is None
