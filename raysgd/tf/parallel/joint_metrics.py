"""The metrics of all ranks, and what an epoch of Keras reports of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from raysgd.connections.group import Array
from raysgd.tf.parallel.exchange_record import ExchangeRecord
from raysgd.tf.parallel.shared_variables import summed
from raysgd.tf.parallel.traced_step import TracedStep


class JointMetrics:
    """Results of models that are those of all ranks."""

    def __init__(self, exchanges: ExchangeRecord, traced: TracedStep) -> None:
        self._exchanges, self._traced = exchanges, traced
        self._is_merging = False
        self._num_samples_last: Any = None  # a variable: samples in the last batch of a Keras loop

    def note_batch(self, count: Any) -> None:
        """Notes how many samples the batch of a step has."""
        import tensorflow as tf

        if self._num_samples_last is None:
            with tf.init_scope():
                self._num_samples_last = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._num_samples_last.assign(tf.cast(count, tf.int64))

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Inside, the results of models that are watched are those of all ranks whenever an epoch ends."""
        self._is_merging = True
        try:
            yield
        finally:
            self._is_merging = False

    def results_of(self, model: Any) -> Any:
        """Return what takes the place of the `get_metrics_result` of a model."""
        inner = model.get_metrics_result

        def get_metrics_result() -> Any:
            import tensorflow as tf

            is_in_step = self._traced.num_samples is not None or not tf.executing_eagerly()
            if is_in_step or not self._is_merging:
                return inner()
            with summed(self._exchanges.group, variables_of(model.metrics)):
                return tf.nest.map_structure(lambda tensor: tensor, inner())

        return get_metrics_result

    def logs_of(self, model: Any, inner: Callable[[Any], Any]) -> Any:
        """Return what Keras takes for the results of an epoch: those of the metrics, or what the last step returned."""

        def chosen(logs: Any) -> Any:
            results = inner(logs)
            if results is not logs or not isinstance(logs, Mapping) or not self._is_merging:
                return results
            return self._of_all_ranks(model, logs)

        return chosen

    def _of_all_ranks(self, model: Any, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of metrics over all ranks, and of other numbers the mean by samples, of the last step.

        A rank without samples in that step has no say.
        """
        returned, own = _flat(logs), _flat(_results(model))
        with summed(self._exchanges.group, variables_of(model.metrics)):
            joint = _flat(_results(model))
        count = 0.0 if self._num_samples_last is None else float(self._num_samples_last.numpy())
        told = [count]
        for path, value in returned.items():
            weighted = count * value if count else np.zeros_like(value)
            told += [count * _is_same(value, own.get(path)), *weighted.reshape(-1)]
        sums = np.array(told)
        self._exchanges.group.add_up(sums)
        means = iter(sums[1:] / sums[0] if sums[0] else sums[1:])
        for path, value in returned.items():
            is_of_metric, mean = next(means) == 1.0, np.array([next(means) for _ in range(value.size)])
            returned[path] = joint[path] if is_of_metric else mean.reshape(value.shape)
        return _with_values(logs, returned)


def variables_of(metrics: Sequence[Any]) -> list[Any]:
    """The state of metrics, each variable once."""
    return list({id(variable): variable for metric in metrics for variable in metric.variables}.values())


def _results(model: Any) -> dict[str, Any]:
    """The results of all metrics of a model, under the names of the metrics and under those that Keras gives them."""
    by_name = {metric.name: metric.result() for metric in model.metrics}
    return {**type(model).get_metrics_result(model), **by_name}


def _flat(logs: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Array]:
    """The numbers in dicts within dicts, by the path to them."""
    found: dict[tuple[str, ...], Array] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, (*path, name)))
        elif np.asarray(value).dtype.kind in "biuf":
            found[(*path, name)] = np.asarray(value, np.float64)
    return found


def _with_values(logs: Mapping[str, Any], values: Mapping[tuple[str, ...], Array], path: Any = ()) -> dict[str, Any]:
    """The same dicts with other numbers."""
    return {
        name: _with_values(value, values, (*path, name))
        if isinstance(value, Mapping)
        else values.get((*path, name), value)
        for name, value in logs.items()
    }


def _is_same(value: Array, other: Array | None) -> bool:
    return other is not None and value.shape == other.shape and np.allclose(value, other, equal_nan=True)
