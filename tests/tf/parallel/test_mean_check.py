"""Whether a loss that users wrote is the mean over the samples, found out before the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raysgd.engine.shared.types import World
from raysgd.tf.creator_operator import make_operator
from raysgd.tf.hosting import building
from raysgd.tf.objects.registration import variables_of_optimizer
from raysgd.tf.operator.operator_context import OperatorContext
from raysgd.tf.operator.settings import TFSettings
from raysgd.tf.parallel import keras_sync
from raysgd.tf.parallel.keras_sync import Synchronizer
from tests.helpers.lazily import imported
from tests.tf.alike import TwoAlike
from tests.tf.models import Line, make_data, make_layers, make_model

tf = imported("tensorflow")


def errors(y_true: Any, y_pred: Any) -> Any:
    return (y_true - y_pred) ** 2


def summed(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_sum(errors(y_true, y_pred))


def averaged(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(errors(y_true, y_pred))


def added(reduce: Callable[..., Any]) -> Any:
    """A layer that adds a small loss of its own, as a VAE does, and draws random numbers."""

    class Adding(tf.keras.layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, inputs: Any) -> Any:
            self.add_loss(1e-3 * reduce(inputs**2))
            return inputs + tf.random.normal(tf.shape(inputs))

    return Adding()


def compiled(loss: Any, *layers: Any) -> Any:
    model = tf.keras.Sequential([*make_layers({})[:-1], *layers, tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.Adam(), loss=loss)
    return model


def clipping() -> Any:
    class Model(tf.keras.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = summed(data[1], self(data[0], training=True)) / 4
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1e-3)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Model(make_layers({}))
    model.compile(optimizer="sgd")
    return model


class Summing(Line):
    def forward(self, features: Any, target: Any, sample_weight: Any = None, training: bool = False) -> tuple[Any, ...]:
        output = self.model(features, training=training)
        return output, summed(target, output)


class Weighing(Line):
    def forward(self, features: Any, target: Any, sample_weight: Any = None, training: bool = False) -> tuple[Any, ...]:
        output = self.model(features, training=training)
        return output, averaged(target, output), 3.0


@pytest.fixture
def warnings_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[Any], list[str]]:
    """The warnings about an operator on one of two ranks, whose model is the same afterwards."""
    monkeypatch.setattr(keras_sync, "group_of", lambda world: TwoAlike())

    def check(operator_cls: Any) -> list[str]:
        world = World(0, 2)
        synchronizer = Synchronizer(world)
        operator = operator_cls({}, OperatorContext(TFSettings(operator_cls, {}, seed=1), world, synchronizer, None))
        uses_fit = not isinstance(operator, Line)
        building.build(operator, uses_fit, True, synchronizer)
        optimizer_variables = variables_of_optimizer(operator._optimizers[0])
        variables = [*operator._models[0].variables, *optimizer_variables]
        before = [variable.numpy() for variable in variables]
        building.check_loss(operator, uses_fit, synchronizer)
        assert all(np.array_equal(one, other.numpy()) for one, other in zip(before, variables, strict=True))
        assert synchronizer.exchanges.num_completed == 0
        return caplog.messages

    return check


@pytest.mark.parametrize(
    ("model", "is_sum"),
    [
        (lambda: compiled(summed), True),
        (lambda: compiled("mse", added(tf.reduce_sum)), True),
        (clipping, True),
        (lambda: compiled(averaged, tf.keras.layers.Dropout(0.5), tf.keras.layers.BatchNormalization()), False),
        (lambda: compiled(errors), False),
        (lambda: compiled(tf.keras.losses.MeanSquaredError(reduction="sum"), added(tf.reduce_mean)), False),
    ],
)
def test_a_sum_over_the_samples_of_a_model_is_found(
    warnings_of: Callable[[Any], list[str]], model: Callable[[], Any], is_sum: bool
) -> None:
    tf.keras.utils.set_random_seed(7)
    messages = warnings_of(make_operator(lambda config: model(), make_data))
    assert len(messages) == is_sum
    assert all("it grows 2.0 times" in message and "`tf.reduce_mean`" in message for message in messages)


@pytest.mark.parametrize(("operator_cls", "is_sum"), [(Summing, True), (Weighing, False), (Line, False)])
def test_and_one_of_an_operator(warnings_of: Callable[[Any], list[str]], operator_cls: Any, is_sum: bool) -> None:
    assert len(warnings_of(operator_cls)) == is_sum


def test_losses_and_layers_of_keras_are_not_tried_out(
    warnings_of: Callable[[Any], list[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(Synchronizer, "warn_of_sum", lambda *arguments: tried.append(arguments))
    warnings_of(make_operator(make_model, make_data))
    assert not tried


def test_a_step_that_does_not_take_samples_that_were_made_up_is_left_to_the_training(
    warnings_of: Callable[[Any], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(y_true: Any, y_pred: Any) -> Any:
        raise ValueError("these are no labels")

    caplog.set_level(logging.DEBUG, "raysgd.tf.parallel.mean_check")
    [message] = warnings_of(make_operator(lambda config: compiled(refusing), make_data))
    assert "it could not be checked" in message
