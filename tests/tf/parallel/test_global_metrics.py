"""Variables of all ranks: metrics by their aggregation, which go again, and means that stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from raysgd.core.connections.group import Group
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.parallel import keras_sync
from raysgd.tf.parallel.global_metrics import merge_statistics, merged, share_first
from raysgd.tf.parallel.keras_sync import Synchronizer
from tests.tf.lab import TwoAlike


def values(variables: list[Any]) -> list[Any]:
    return [variable.numpy().tolist() for variable in variables]


def own_metric(keras: Any, **kinds: Any) -> Any:
    """A metric with a variable for each aggregation, under its name; without one for None."""
    import tensorflow as tf

    class Own(keras.metrics.Metric):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="own")
            add = self.add_weight if "tf_keras" in keras.__name__ else self.add_variable
            for name, aggregation in kinds.items():
                setattr(self, name, add(shape=(), initializer="ones", name=name, aggregation=aggregation))

        def update_state(self, *arguments: Any, **named: Any) -> None:
            pass

        def result(self) -> Any:
            return tf.constant(0.0)

    return Own()


def aggregations(keras: Any) -> dict[str, Any]:
    import tensorflow as tf

    if "tf_keras" not in keras.__name__:
        return {"sum": "sum", "mean": "mean", "first": "only_first_replica"}
    known = tf.VariableAggregation
    return {"sum": known.SUM, "mean": known.MEAN, "first": known.ONLY_FIRST_REPLICA}


def test_a_metric_is_merged_by_the_aggregation_of_its_variables_and_has_its_own_values_afterwards(
    keras_here: Any,
) -> None:
    metric = own_metric(keras_here, **aggregations(keras_here))
    with merged(TwoAlike(), [metric]):
        # TwoAlike doubles what rank 0 sends, also what only rank 0 has.
        assert values([metric.sum, metric.mean, metric.first]) == [2.0, 1.0, 2.0]
    assert values(metric.variables) == [1.0, 1.0, 1.0]
    with merged(Group(World(0, 1)), [metric]):
        assert values(metric.variables) == [1.0, 1.0, 1.0], "a rank that is alone"


def test_a_metric_whose_variables_name_no_aggregation_is_refused(
    keras_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    if Version("3") <= Version(keras_here.__version__) < Version("3.6"):
        pytest.skip("there are none: each has the aggregation `mean`, unless it names another")
    none = tf.VariableAggregation.NONE if "tf_keras" in keras_here.__name__ else "none"
    model = keras_here.Sequential([keras_here.layers.Input([1]), keras_here.layers.Dense(1)])
    model.compile(loss="mse", metrics=[own_metric(keras_here, seen=none)])
    monkeypatch.setattr(keras_sync, "group_of", lambda world: TwoAlike())
    data = tf.data.Dataset.from_tensors((np.ones([2, 1], "float32"), np.ones([2, 1], "float32")))
    synchronizer = Synchronizer(World(0, 2))
    expected = r'keeps `(own/)?seen` without an aggregation, .* make it with `self.add_\w+\(..., aggregation="sum"\)`'

    def train() -> None:
        synchronizer.watch_model(model)
        with synchronizer.merging_metrics():  # metrics of `compile` are known once a batch has come
            model.fit(data, verbose=0)

    with pytest.raises(IncompatibleModelError, match=expected):
        train()


def test_an_epoch_reports_metrics_of_all_ranks_and_means_of_other_numbers(
    keras_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    class Model(keras_here.Sequential):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> dict[str, Any]:
            super().train_step(data)
            self.count.update_state(data[0])
            return {"count": self.count.result(), "raw": tf.reduce_sum(data[0]), "unseen": tf.constant(7.0)}

    model = Model([keras_here.layers.Input([1]), keras_here.layers.Dense(1)])
    model.count, model.unseen = keras_here.metrics.Sum(name="count"), keras_here.metrics.Sum(name="unseen")
    model.compile(optimizer="sgd", loss="mse")
    monkeypatch.setattr(keras_sync, "group_of", lambda world: TwoAlike())
    ones = np.ones([4, 1], "float32")
    synchronizer = Synchronizer(World(0, 2))
    synchronizer.watch_model(model)
    with synchronizer.merging_metrics():
        history = model.fit(tf.data.Dataset.from_tensor_slices((ones, ones)).batch(3), verbose=0).history
    assert history == {"count": [8.0], "raw": [1.0], "unseen": [7.0]}, "raw: of the last step"


def test_statistics_become_means_and_counters_stay() -> None:
    import tensorflow as tf

    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)]
    merge_statistics(TwoAlike(), [SimpleNamespace(non_trainable_weights=variables)])
    assert values(variables) == [[1.0, 2.0], 3]


def test_strings_are_not_shared() -> None:
    import tensorflow as tf

    variables = [tf.Variable([1.0, 2.0]), tf.Variable("text")]
    share_first(TwoAlike(), variables)
    assert values(variables[:1]) == [[1.0, 2.0]]
    assert variables[1].numpy() == b"text"
