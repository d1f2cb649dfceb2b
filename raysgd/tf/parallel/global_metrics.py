"""Merges variables of Keras objects over all ranks.

The variables of metrics are merged as their `aggregation` says. Statistics such as BatchNorm's are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np

from raysgd.core.connections.group import Array, Group
from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.objects import registration
from raysgd.tf.parallel.averaging import ExchangeRecord
from raysgd.tf.parallel.global_losses import GlobalLosses
from raysgd.tf.parallel.step import TracedStep, assigned

_SUM, _MEAN, _FIRST = "sum", "mean", "only_first_replica"


class GlobalMetrics:
    """Makes Keras models report an epoch's metrics over all ranks instead of over one rank.

    Keras takes an epoch's results from the model's `get_metrics_result`, but only if this method returns the same names
    as the last step. This class replaces `get_metrics_result` with a method that returns these names. The values of
    metrics are results over all ranks. All other numbers are averaged over the ranks, weighted by samples.

    Args:
        exchanges: Holds the group of ranks.
        traced: The step of a Keras loop that is being traced.
        losses: Its `evaluates_together` is True while a Keras loop evaluates and each rank has its part of the same
            global batches.
    """

    def __init__(self, exchanges: ExchangeRecord, traced: TracedStep, losses: GlobalLosses) -> None:
        self._exchanges, self._traced, self._losses = exchanges, traced, losses
        self._is_merging = False
        self._last: Any = None  # TensorFlow variable with two values: samples in the last batch, and `is_test`
        self._returned: dict[bool, dict[str, Any]] = {}  # by `is_test`: variables with the step's last metrics
        self._batches: dict[bool, list[Array]] = {}  # by `is_test`, for each batch: its size, and metrics after it

    def note_batch(self, count: Any) -> None:
        """Make the step that is being traced store the number of samples in its batch."""
        import tensorflow as tf

        self._last = _assigned(self._last, tf.stack([tf.cast(count, tf.int64), int(self._traced.is_test)]))

    def note_returned(self, numbers: Any) -> None:
        """Make the traced step store the metrics that the user's own `train_step` or `test_step` returns.

        If one of the metrics has an unknown shape or is not a floating-point number, none of them is used.
        """
        import tensorflow as tf

        before, is_test = self._returned.get(self._traced.is_test, {}), self._traced.is_test
        flat = {name: value for name, value in numbers.items() if not isinstance(value, Mapping)}
        tensors = {name: tf.convert_to_tensor(value) for name, value in flat.items()}
        is_known = all(each.shape.is_fully_defined() and each.dtype.is_floating for each in tensors.values())
        noted = {name: _assigned(before.get(name), tf.cast(each, tf.float64)) for name, each in tensors.items()}
        self._returned[is_test] = {**dict.fromkeys(numbers), **noted} if is_known else {}

    def note_means(self, model: Any, count: Any) -> None:
        """Make the step that is being traced record the model's mean metrics after each batch.

        Some of these metrics weight all batches equally. Averaging them over ranks would ignore that the ranks' parts
        of a global batch differ in size. `get_metrics_result` therefore corrects them at the end of an epoch.
        """
        import tensorflow as tf

        means = _means_of(model)
        if means:
            note = partial(self._note_batch, self._traced.is_test)
            numbers = [number for metric in means for number in (metric.total, metric.count)]
            values = tf.stack([tf.cast(number, tf.float64) for number in (count, *numbers)])
            tf.numpy_function(note, [values], [])

    def _note_batch(self, is_test: bool, values: Array) -> None:
        """Store the size of a batch and the metrics after it. TensorFlow calls this each time that the graph runs."""
        batches = self._batches.setdefault(is_test, [])
        # If no metric's count has grown since the last batch, the metrics were reset, so another epoch has started.
        if batches and values[0] and (values[2::2] <= batches[-1][2::2]).all():
            batches.clear()
        batches.append(values)

    def _set_means_of_batches(self, model: Any, is_test: bool) -> None:
        """Correct metrics that weight all batches equally.

        Set these metrics to the values that a single process would compute from the global batches.
        """
        means, group, batches = _means_of(model), self._exchanges.group, self._batches.pop(is_test, [])
        if group.size == 1 or not means or (is_test and not self._losses.evaluates_together):
            return
        own = np.zeros([int(group.largest(float(len(batches)))), 1 + 2 * len(means)])
        if batches:  # fill from the end: a rank that joined in the middle of an epoch has only its last batches
            own[-len(batches) :] = np.diff(batches, axis=0, prepend=0.0)
            own[-len(batches) :, 0] = [each[0] for each in batches]
        numbers, totals, counts = own[:, :1], own[:, 1::2], own[:, 2::2]
        scores = ((counts == 1) & (numbers > 1)).any(axis=0) - 1e9 * ((counts != 1) & (numbers > 0)).any(axis=0)
        sums = np.vstack([np.hstack([numbers, totals * numbers]), [0.0, *scores]])
        group.add_up(sums)
        has_some = sums[:-1, 0] > 0
        for index, metric in enumerate(means, start=1):
            if sums[-1, index] > 0:
                metric.total.assign((sums[:-1, index] / np.maximum(sums[:-1, 0], 1.0)).sum())
                metric.count.assign(has_some.sum())

    def merging(self) -> AbstractContextManager[None]:
        """Inside the block, let models return results over all ranks when an epoch or an evaluation ends."""
        return assigned(self, _is_merging=True)

    def results_of(self, model: Any) -> Any:
        """Return a replacement for a model's `get_metrics_result` that returns results over all ranks."""
        inner = model.get_metrics_result

        def get_metrics_result() -> Any:
            import tensorflow as tf

            is_in_step = self._traced.num_samples is not None or not tf.executing_eagerly()
            if is_in_step or not self._is_merging:
                return inner()
            with merged(self._exchanges.group, model.metrics):
                self._set_means_of_batches(model, bool(self._last is not None and self._last.numpy()[1]))
                results = tf.nest.map_structure(lambda tensor: tensor, inner())
                has_seen = {metric.name: any(map(np.any, _values(metric.variables))) for metric in model.metrics}
                by_name = {metric.name: metric.result() for metric in model.metrics}
            return self._as_returned({**by_name, **results}, results, has_seen)

        return get_metrics_result

    def _as_returned(self, known: Mapping[str, Any], results: Any, has_seen: Mapping[str, bool]) -> Any:
        """Return an epoch's results under the names that the user's own `train_step` or `test_step` last returned.

        If the user has not overridden the step, return `results` unchanged. A number that is not the result of a metric
        is averaged over the ranks, weighted by samples.

        Args:
            known: Results over all ranks, by name.
            results: The result of the model's own `get_metrics_result`.
            has_seen: For each metric's name, whether the metric was updated.
        """
        count, is_test = (0, 0) if self._last is None else self._last.numpy()
        returned = self._returned.get(bool(is_test))
        if not returned:
            return results
        is_of_metric = {name: has_seen.get(name, name in known) for name in returned}
        others = [name for name, number in returned.items() if number is not None and not is_of_metric[name]]
        values = [np.asarray(returned[name].numpy()) for name in others]
        weighted = [value.reshape(-1) * count if count else np.zeros(value.size) for value in values]
        sums = np.concatenate([[float(count)], *weighted])
        self._exchanges.group.add_up(sums)
        means, of_all = iter(sums[1:] / max(sums[0], 1.0)), dict(known)
        for name, value in zip(others, values, strict=True):
            of_all[name] = np.array([next(means) for _ in range(value.size)]).reshape(value.shape)
        return {name: of_all.get(name) for name in returned}


def _means_of(model: Any) -> list[Any]:
    """Return those metrics of a model that might weight all batches equally, whatever the batches' sizes.

    These are the losses of individual outputs, and metrics that were given as functions.
    """
    metrics: Any = registration.keras_of(model).metrics
    all_metrics = [inner for metric in model.metrics for inner in getattr(metric, "metrics", None) or [metric]]
    return [one for one in all_metrics if type(one) in (metrics.Mean, metrics.MeanMetricWrapper) and one.name != "loss"]


@contextmanager
def merged(group: Group, metrics: Sequence[Any]) -> Iterator[None]:
    """Inside the block, the metrics' variables have values merged over all ranks, as their `aggregation` says.

    After the block, they have this rank's values again.
    """
    by_id = {id(variable): variable for metric in metrics for variable in metric.variables}
    variables = list(by_id.values()) if group.size > 1 else []
    if not variables:
        yield
        return
    check_aggregation(metrics)
    own = _values(variables)
    shares = {_SUM: 1.0, _MEAN: 1.0 / group.size, _FIRST: float(group.rank == 0)}
    _assign_sums(group, variables, own, [shares[_aggregation_of(variable)] for variable in variables])
    try:
        yield
    finally:
        for variable, array in zip(variables, own, strict=True):
            variable.assign(array)


def check_aggregation(metrics: Sequence[Any]) -> None:
    """Check that each variable of the metrics has an `aggregation`, which says how to merge it over workers.

    Raises:
        IncompatibleModelError: A variable has no aggregation.
    """
    for metric in metrics:
        for variable in metric.variables:
            if _aggregation_of(variable) not in (_SUM, _MEAN, _FIRST):
                method = "add_weight" if registration.is_legacy(metric) else "add_variable"
                name = str(getattr(variable, "path", variable.name)).partition(":")[0]
                raise IncompatibleModelError(
                    f"the metric `{metric.name}` keeps `{name}` without an aggregation, so the results of several "
                    f'workers cannot be merged: make it with `self.{method}(..., aggregation="sum")`; allowed are '
                    '"sum", "mean" and "only_first_replica".'
                )


def merge_statistics(group: Group, models: Sequence[Any]) -> None:
    """Average the models' non-trainable floating-point weights, such as BatchNorm's statistics, over all ranks."""
    weights = [weight for model in models for weight in model.non_trainable_weights]
    # V is bfloat16, which is not a built-in dtype of NumPy.
    variables = [weight for weight, value in zip(weights, _values(weights), strict=True) if value.dtype.kind in "fV"]
    if group.size > 1 and variables:
        _assign_sums(group, variables, _values(variables), [1.0 / group.size] * len(variables))


def share_first(group: Group, variables: Sequence[Any]) -> None:
    """Broadcast rank 0's values of the variables to all ranks."""
    if group.size == 1:
        return
    for variable in variables:
        array = np.array(variable.numpy())
        if array.dtype.hasobject:  # strings have no fixed size and are not broadcast
            continue
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        group.from_first(flat)
        variable.assign(flat.view(array.dtype).reshape(array.shape))


def _aggregation_of(variable: Any) -> str:
    """Return a variable's aggregation in lower case. Keras 3 stores it as a string, TensorFlow as an enum."""
    aggregation = getattr(variable, "aggregation", None)
    return str(getattr(aggregation, "name", aggregation)).lower()


def _assigned(variable: Any, value: Any) -> Any:
    """Assign a value to a variable and return the variable.

    If the variable is None or has another shape than the value, create a new variable for the value and return it.
    """
    import tensorflow as tf

    if variable is None or variable.shape != value.shape:
        with tf.init_scope():
            variable = tf.Variable(tf.zeros(value.shape, value.dtype), trainable=False)
    variable.assign(value)
    return variable


def _values(variables: Sequence[Any]) -> list[Array]:
    return [np.asarray(variable.numpy()) for variable in variables]


def _assign_sums(group: Group, variables: Sequence[Any], own: Sequence[Array], shares: Sequence[float]) -> None:
    """Assign to each variable a weighted sum of its values on all ranks.

    Args:
        group: The group of ranks.
        variables: The variables to assign.
        own: This rank's values of the variables.
        shares: For each variable, the weight of this rank's value in the sum.
    """
    flat = np.concatenate([array.reshape(-1) * np.float64(share) for array, share in zip(own, shares, strict=True)])
    group.add_up(flat)
    parts = np.split(flat, np.cumsum([array.size for array in own])[:-1])
    for variable, array, part in zip(variables, own, parts, strict=True):
        variable.assign(part.reshape(array.shape).astype(array.dtype))
