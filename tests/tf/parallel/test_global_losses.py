"""How much a rank's share of a batch counts: its samples, the scale of its losses, and losses that are refused.

`tests/tf/data/test_dataset_streams.py` tests how a step comes to know its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from raysgd.core.arrays.division import plan_of
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.parallel import global_losses, keras_sync
from raysgd.tf.parallel.averaging import ExchangeRecord
from raysgd.tf.parallel.global_losses import SUM, GlobalLosses
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.parallel.step import TFStep, TracedStep, repeat_with_zeros
from raysgd.tf.training_operator import OperatorContext, TFSettings
from tests.helpers.lazily import imported
from tests.tf.lab import TwoAlike
from tests.tf.models import Line, make_data

tf = imported("tensorflow")


class Replica:
    """The parts of one of two replicas that always have the same."""

    def __init__(self) -> None:
        self.traced, self.step, self.validation_step = TracedStep(), TFStep(), TFStep()
        self.losses = GlobalLosses(ExchangeRecord(TwoAlike()), self.traced, self.step, self.validation_step)


def test_samples_are_those_of_our_loop_or_those_counted_or_one() -> None:
    replica = Replica()
    assert [replica.losses.num_samples_of(counted, print) for counted in (-1, 0, 5)] == [1, 0, 5]
    replica.step.begin_batch(plan_of(3, 6))
    assert replica.losses.num_samples_of(5, print) == 3


def test_a_sum_counts_by_the_samples_of_all_ranks_and_a_mean_by_its_weights() -> None:
    replica = Replica()
    with replica.traced.tracing(4, is_test=False):
        assert float(replica.losses.factor(SUM)) == 2.0
        assert float(replica.losses.factor(2.0)) == 1.0
        assert len(replica.traced.exchanges) == 2
    assert replica.traced.exchanges == []


def test_losses_are_compared_in_an_evaluation_only_if_all_ranks_have_the_same_global_batch() -> None:
    replica = Replica()
    with replica.traced.tracing(4, is_test=True):
        assert float(replica.losses.factor(SUM)) == 1.0
        replica.losses.evaluates_together = True
        assert float(replica.losses.factor(SUM)) == 2.0


def test_a_rank_without_samples_repeats_the_exchanges_of_its_usual_step() -> None:
    replica = Replica()
    with pytest.raises(IncompatibleModelError, match="the first batch must have a sample"):
        repeat_with_zeros((), None)
    with replica.traced.tracing(4, is_test=False):
        replica.losses.factor(SUM)
        exchanges = list(replica.traced.exchanges)
    assert exchanges
    assert repeat_with_zeros(exchanges, {"loss": tf.constant([2.0])})["loss"].numpy().tolist() == [0.0]


TOKENS = np.array([[1, 2, 0, 0], [3, 1, 2, 0]], "int32")
LABELS = np.array([[1, 2, 2, 2], [2, 1, 0, 0]], "int32")
WEIGHTS = np.array([[2.0], [1.0]], "float32")


@pytest.mark.parametrize(
    ("is_masked", "options", "weighs", "divisor"),
    [
        (False, {}, True, None),
        (True, {}, True, 5.0),
        (False, {"ignore_class": 2}, False, 4.0),
        (True, {"ignore_class": 2}, False, 3.0),
        (True, {"reduction": "mean_with_sample_weight"}, True, 7.0),
        (False, {"reduction": "mean_with_sample_weight"}, False, 8.0),
    ],
)
def test_a_loss_says_what_it_was_divided_by(
    keras_here: Any, is_masked: bool, options: dict[str, Any], weighs: bool, divisor: float | None
) -> None:
    if "reduction" in options and Version(keras_here.__version__) < Version("3.6"):
        pytest.skip("tf_keras, and Keras before 3.6, have no mean by weights")
    layers = keras_here.layers
    model = keras_here.Sequential([layers.Input([4], dtype="int32"), layers.Embedding(4, 3, mask_zero=is_masked)])
    loss = keras_here.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
    found = []

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def of(tokens: Any, labels: Any, weights: Any) -> Any:
        number = global_losses._divisor(keras_here, loss, labels, model(tokens), weights if weighs else None)
        found.append(number)
        return tf.constant(0.0) if number is None else number

    number = float(of(TOKENS, LABELS, WEIGHTS))
    assert (None if found[0] is None else number) == divisor


def errors(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean((y_true - y_pred) ** 2, axis=-1)


def scalar(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(errors(y_true, y_pred))


def scalar_loss(keras: Any) -> Any:
    class Own(keras.losses.Loss):  # type: ignore[misc, name-defined]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return scalar(y_true, y_pred)

    return Own()


def of_classes(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean((y_true - y_pred) ** 2, axis=0)


def of_some_samples(y_true: Any, y_pred: Any) -> Any:
    return tf.boolean_mask(errors(y_true, y_pred), y_true[:, 0] > 0)


def with_step(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """A model whose own step changes gradients, or makes a loss of errors."""

    def make(keras: Any) -> Any:
        class Model(keras.Sequential):  # type: ignore[misc, name-defined]
            def train_step(self, data: Any) -> dict[str, Any]:
                with tf.GradientTape() as tape:
                    loss, _ = change(errors(data[1], self(data[0], training=True)), [])
                gradients = change(tf.zeros([1]), tape.gradient(loss, self.trainable_variables))[1]
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
                return {"loss": loss}

        return Model

    return make


def clipped(values: Any, gradients: list[Any]) -> tuple[Any, Any]:
    return tf.reduce_mean(values), gradients and tf.clip_by_global_norm(gradients, 0.1)[0]


def averaged(values: Any, gradients: list[Any]) -> tuple[Any, Any]:
    return tf.nn.compute_average_loss(values, global_batch_size=4), gradients


def plain(keras: Any) -> Any:
    return keras.Sequential


@pytest.mark.parametrize(
    ("model_cls", "loss", "message"),
    [
        (plain, lambda keras: scalar, "the loss `scalar` returns a scalar, .* Return one value for each sample"),
        (plain, scalar_loss, "the loss `Own` returns a scalar"),
        (plain, lambda keras: of_classes, "the loss `of_classes` has no value for each sample, .* Use `tf.reduce_mean"),
        (plain, lambda keras: of_some_samples, "the loss `of_some_samples` has no .* 0 for samples that do not count"),
        (with_step(clipped), None, "`tf.clip_by_global_norm` in your own step .* `global_clipnorm=...`"),
        (with_step(averaged), None, "`tf.nn.compute_average_loss` in your own step .* `sample_weight`"),
    ],
)
def test_what_says_nothing_about_its_samples_is_refused_at_the_first_trace(
    keras_here: Any, monkeypatch: pytest.MonkeyPatch, model_cls: Any, loss: Any, message: str
) -> None:
    monkeypatch.setattr(keras_sync, "group_of", lambda world: TwoAlike())
    model = model_cls(keras_here)([keras_here.layers.Input([4]), keras_here.layers.Dense(1)])
    model.compile(optimizer="sgd", loss=None if loss is None else loss(keras_here))
    synchronizer = Synchronizer(World(0, 2))
    synchronizer.watch_model(model)
    with pytest.raises(IncompatibleModelError, match=message), synchronizer.exchanges.surfacing_errors():
        model.fit(make_data({})[0], verbose=0)


@pytest.mark.keras_in_turns("keras3")
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("dice", r"the loss `dice` has no value for each sample, .* Use `keras.losses.Dice\(axis=\(1, 2\)\)`"),
        ("Tversky", r"the loss `Tversky` has .* Use `keras.losses.Tversky\(axis=\(1, 2\)\)`"),
        (lambda losses: losses.Dice(), "the loss `Dice` has"),
        (lambda losses: losses.Dice(axis=(1, 2)), ""),
        (lambda losses: losses.Dice(axis=(0, 1)), "the loss `Dice` has"),
        (lambda losses: losses.Circle(), "the loss `Circle` .* train with `num_workers=1`"),
        (lambda losses: losses.CategoricalCrossentropy(axis=-3), r"`keras.losses.CategoricalCrossentropy\(axis=\(1"),
        (lambda losses: losses.CategoricalCrossentropy(), ""),
        ("mse", ""),
    ],
)
def test_losses_of_keras_that_need_the_whole_batch_are_refused(keras_here: Any, loss: Any, message: str) -> None:
    if Version(keras_here.__version__) < Version("3.8"):
        pytest.skip("losses over axes are of newer versions")
    found = global_losses._named(keras_here, loss if isinstance(loss, str) else loss(keras_here.losses))
    output = tf.zeros([2, 3, 4])
    if not message:
        global_losses._refuse_axes(found, output)
        return
    with pytest.raises(IncompatibleModelError, match=message):
        global_losses._refuse_axes(found, output)


def test_losses_of_a_replica_that_stays_alone_are_its_own() -> None:
    assert Synchronizer(World(0, 1), counts_steps=True).losses is None
    assert Synchronizer(World(0, 1), num_workers=2).losses is not None, "others will join it"


def branching(y_true: Any, y_pred: Any) -> Any:
    """Keras 2 lets AutoGraph read it; Keras 3 does not."""
    if tf.reduce_mean(y_true) > 100:
        return errors(y_true, y_pred) / 2
    return errors(y_true, y_pred)


def test_gradients_that_an_optimizer_clips_by_their_norm_are_not(
    keras_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keras_sync, "group_of", lambda world: TwoAlike())
    model = keras_here.Sequential([keras_here.layers.Input([4]), keras_here.layers.Dense(1)])
    loss = branching if "tf_keras" in keras_here.__name__ else errors
    model.compile(optimizer=keras_here.optimizers.SGD(global_clipnorm=0.1), loss=loss)
    synchronizer = Synchronizer(World(0, 2))
    synchronizer.watch_model(model)
    model.fit(make_data({})[0], verbose=0)
    assert synchronizer.exchanges.num_completed == 6


class Summing(Line):
    """Registers a sum."""

    def register(self, **given: Any) -> Any:
        return super().register(**{**given, "loss": tf.keras.losses.MeanSquaredError(reduction="sum")})


class Around(Summing):
    """Lets the library make the loss."""

    def forward(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        return super().forward(*arguments, **named)


class Own(Summing):
    """Makes its loss itself."""

    def forward(self, features: Any, target: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        output = self.model(features)
        return output, self.loss(target, output)


class OwnCounted(Own):
    """Says how much its loss counts, which is a sum all the same."""

    def forward(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        return *super().forward(*arguments, **named), 4.0


class OwnStep(Summing):
    def train_step(self, batch: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss(batch[1], self.model(batch[0]))
        self.optimizer_step(tape.gradient(loss, self.model.trainable_variables))
        return {"train_loss": loss}


class Ignoring(Own):
    """Leaves labels out."""

    def register(self, **given: Any) -> Any:
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        return Line.register(self, **{**given, "loss": loss})


class IgnoringCounted(Ignoring):
    """Leaves labels out, and says how many count."""

    def forward(self, features: Any, target: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        return *super().forward(features, 0 * target), 3.0


class Scalar(Line):
    """Registers a mean that it makes itself."""

    def register(self, **given: Any) -> Any:
        return super().register(**{**given, "loss": scalar})


@pytest.mark.parametrize(
    ("operator_cls", "message"),
    [
        (Summing, ""),
        (Around, ""),
        (Own, r"MeanSquaredError\(reduction='sum'\).* is no mean over samples, and your own `forward` or step"),
        (OwnCounted, r"MeanSquaredError\(reduction='sum'\)"),
        (OwnStep, r"MeanSquaredError\(reduction='sum'\)"),
        (Ignoring, r"SparseCategoricalCrossentropy\(ignore_class=-1\)"),
        (IgnoringCounted, ""),
        (Scalar, "returns a scalar"),
    ],
)
def test_losses_of_operators_too(
    keras_here: Any, monkeypatch: pytest.MonkeyPatch, operator_cls: Any, message: str
) -> None:
    monkeypatch.setattr(keras_sync, "group_of", lambda world: TwoAlike())
    world = World(0, 2)
    synchronizer = Synchronizer(world)
    operator = operator_cls({}, OperatorContext(TFSettings(operator_cls, {}, seed=1), world, synchronizer))

    def train() -> None:
        with synchronizer.exchanges.surfacing_errors():
            operator.train_batch(next(iter(operator.train_dataset)), {})

    if not message:
        train()
        return
    with pytest.raises(IncompatibleModelError, match=message):
        train()
