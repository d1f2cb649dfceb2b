"""A `fit` that broke off and goes on: what Keras does once in a `fit` is done once, as where nothing interrupts it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raysgd.core.engine.shared.types import World
from raysgd.tf.creator_operator import make_operator
from raysgd.tf.tf_runner import TFRunner
from raysgd.tf.training_operator import TFSettings
from tests.tf.models import make_data, make_model

NUM_EPOCHS, NUM_STEPS = 3, 5  # 20 samples in batches of 4


class LostError(Exception):
    """Stands for the loss of another worker."""


class Fit:
    """The `fit` of one replica of two, the other of which does nothing but get lost."""

    def __init__(self, callbacks: list[Any], **config: Any) -> None:
        options = {"epochs": NUM_EPOCHS, "callbacks": callbacks, "validation_data": make_data({})[1]}
        config = {"num_samples": NUM_STEPS * 4, "optimizer": "adam", "fit_config": options, **config}
        operator_cls = make_operator(make_model, make_data)
        self.runner = TFRunner(TFSettings(operator_cls, config, seed=0, num_workers=2), World(0, 1))
        self.runner.setup()
        self.operator, self.stream = self.runner.operator, self.runner._hosted.feed.fit

    def run(self, *lost_at: int) -> dict[str, Any]:
        """Run it, losing the other worker ahead of these steps, counted over all epochs."""
        losses = list(lost_at)

        def lose() -> None:
            if losses and self.stream.num_batches_completed == losses[0]:
                losses.pop(0)
                raise LostError

        self.stream.at_boundary = lose
        while True:
            try:
                with self.runner._hosted.synchronizer.exchanges.surfacing_errors():
                    return self.operator.train_epoch([])
            except LostError:
                self.runner._hosted.feed.break_off()

    def weights(self) -> Any:
        model = self.operator.model
        return np.concatenate([np.asarray(variable).reshape(-1) for variable in (*model.weights, *self.averages())])

    def averages(self) -> list[Any]:
        variables = self.operator.model.optimizer.variables
        return list(variables() if callable(variables) else variables)


def noting(keras: Any) -> Any:
    """A callback that notes what it is told, and counts on it."""

    class Notes(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.told: list[tuple[Any, ...]] = []

        def on_train_begin(self, logs: Any = None) -> None:
            self.told.append(("begin", self.params["epochs"], self.params["steps"]))

        def on_train_end(self, logs: Any = None) -> None:
            self.told.append(("end",))

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.7)
            self.told.append(("epoch", epoch, self.params["epochs"], self.params["steps"]))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.told.append(("epoch is over", epoch, sorted(logs)))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.told.append(("step", batch))

    return Notes()


def of_validation(results: dict[str, Any]) -> dict[str, Any]:
    """Without those of training, which count a step twice that broke off."""
    return {name: value for name, value in results.items() if "val_" in name}


@pytest.mark.keras_in_turns("keras3", "keras2")
@pytest.mark.parametrize("frequency", [None, 3])
def test_a_fit_in_parts_averages_weights_and_tells_callbacks_as_one_does(
    keras_here: Any, frequency: int | None
) -> None:
    options = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": frequency}
    whole, parts = (Fit([noting(keras_here)], options=options) for _ in range(2))
    expected = whole.run()
    assert of_validation(parts.run(2, 6, 8, 12)) == pytest.approx(of_validation(expected), rel=1e-5)
    np.testing.assert_allclose(parts.weights(), whole.weights(), atol=1e-6)
    [told], [of_parts] = (fit.operator.config["fit_config"]["callbacks"] for fit in (whole, parts))
    assert of_parts.told == told.told


@pytest.mark.keras_in_turns("keras3", "keras2")
def test_an_epoch_that_broke_off_behind_its_last_step_is_validated_and_told_to_callbacks(keras_here: Any) -> None:
    whole, parts = (Fit([noting(keras_here)], options={"use_ema": True}) for _ in range(2))
    expected = whole.run()
    evaluate, is_lost = parts.operator.model.evaluate, False

    def losing(*arguments: Any, **named: Any) -> Any:
        nonlocal is_lost
        if parts.stream.num_batches_completed == 2 * NUM_STEPS and not is_lost:
            is_lost = True
            raise LostError
        return evaluate(*arguments, **named)

    object.__setattr__(parts.operator.model, "evaluate", losing)
    assert of_validation(parts.run()) == pytest.approx(of_validation(expected), rel=1e-5)
    assert is_lost
    np.testing.assert_allclose(parts.weights(), whole.weights(), atol=1e-6)
    [told], [of_parts] = (fit.operator.config["fit_config"]["callbacks"] for fit in (whole, parts))
    assert of_parts.told == told.told


@pytest.mark.keras_in_turns("keras3", "keras2")
def test_a_callback_that_begins_where_a_fit_goes_on_does_not_change_its_learning_rate(keras_here: Any) -> None:
    whole, parts = (Fit([noting(keras_here)]) for _ in range(2))
    whole.run()

    def lose() -> None:
        if parts.stream.num_batches_completed == 7:
            raise LostError

    parts.stream.at_boundary = lose
    with pytest.raises(LostError), parts.runner._hosted.synchronizer.exchanges.surfacing_errors():
        parts.operator.train_epoch([])
    parts.stream.break_off()
    other = Fit([noting(keras_here)])
    other.runner.restore(parts.runner.state(), None)
    other.stream.resume(parts.stream.state())
    other.run()
    np.testing.assert_allclose(other.weights(), whole.weights(), atol=1e-6)


@pytest.mark.keras_in_turns("keras3", "keras2")
def test_weights_that_a_layer_changes_in_an_interrupted_step_are_as_before_it(keras_here: Any) -> None:
    whole, parts = (Fit([], layers="batch_norm") for _ in range(2))
    whole.run()
    seen = []

    def look() -> None:
        if parts.stream.num_batches_completed == 6 and not seen:
            seen.extend(parts.runner._hosted.state.read()["models"][0])
            raise LostError  # TensorFlow may or may not have updated the layer by now

    parts.stream.at_boundary = look
    with pytest.raises(LostError), parts.runner._hosted.synchronizer.exchanges.surfacing_errors():
        parts.operator.train_epoch([])
    parts.runner._hosted.feed.break_off()
    before = [np.array(each) for each in parts.operator.model.weights]
    assert len(seen) == len(before)
    assert all(map(np.array_equal, seen, before)), "a snapshot in the step has the same"
    parts.run()
    np.testing.assert_allclose(parts.weights(), whole.weights(), atol=1e-6)
