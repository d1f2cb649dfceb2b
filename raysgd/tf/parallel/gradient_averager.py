"""The average of the gradients of all ranks, by samples, in one exchange for each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from raysgd.connections.group import Array
from raysgd.tf.parallel.exchange import GradientLayout
from raysgd.tf.parallel.exchange_record import ExchangeRecord
from raysgd.tf.parallel.sample_weights import SampleWeights
from raysgd.tf.parallel.traced_step import TracedStep

_EQUAL_WEIGHTS = 1e-6
"""The sum of the ranks' weights is 1 up to this when all have as many samples as the first step had."""


class GradientAverager:
    """Averages the gradients of one optimizer.

    A gradient is copied into the buffer with its weight in one pass, the buffer is added up over all ranks in place,
    and TensorFlow uses the sums where they lie. The weight of a rank is its samples over those of a full step, which is
    what the first step is taken for; the sum of the weights travels along. In full steps it is 1, and nothing more is
    to be done.
    """

    def __init__(self, exchanges: ExchangeRecord, traced: TracedStep, weights: SampleWeights) -> None:
        self._exchanges, self._traced, self._weights = exchanges, traced, weights
        self._full_step: float | None = None
        self._layouts: dict[tuple[Any, ...], GradientLayout] = {}

    def forget_full_step(self) -> None:
        """Takes the next step for a full one: the ranks of a new group have none in common."""
        self._full_step = None

    def average(self, gradients: Sequence[Any], is_step: bool = True) -> list[Any]:
        """The mean of all ranks' gradients, as tensors; None stays None.

        Args:
            gradients: Those of this rank.
            is_step: Whether an optimizer takes a step with the mean.
        """
        import tensorflow as tf

        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return list(gradients)
        dense = [tf.convert_to_tensor(gradient) for gradient in given if not isinstance(gradient, tf.IndexedSlices)]
        sparse = [part for gradient in given if isinstance(gradient, tf.IndexedSlices) for part in _parts(gradient)]
        count = self._traced.num_samples_or_unknown()
        sent = [*dense, *sparse]
        exchange = partial(self._exchange, len(dense), is_step)
        found = tf.numpy_function(exchange, [count, *sent], [tensor.dtype for tensor in sent])
        received = tf.nest.flatten(found)  # eagerly, a single tensor comes without a list
        for index, (before, after) in enumerate(zip(sent, received, strict=True)):
            after.set_shape(before.shape if index < len(dense) else [None, *before.shape[1:]])
        averages, joined = iter(received), iter(received[len(dense) :])
        return [_like(gradient, averages, joined) for gradient in gradients]

    def _exchange(self, num_dense: int, is_step: bool, count: Array, *gradients: Array) -> list[Array]:
        """Runs whenever the graph does, in one of TensorFlow's threads."""
        try:
            if is_step and self._exchanges.before_exchange is not None:
                self._exchanges.before_exchange()
            num_samples = self._weights.num_samples_of(int(count))
            with self._exchanges.exchanging(num_samples, is_step):
                return self._averaged(num_samples, gradients[:num_dense], gradients[num_dense:])
        except BaseException as error:
            self._exchanges.note(error)
            raise

    def _averaged(self, num_samples: float, gradients: Sequence[Array], sparse: Sequence[Array]) -> list[Array]:
        group = self._exchanges.group
        if self._full_step is None:
            self._full_step = max(1.0, group.largest(num_samples))
        key = tuple((gradient.shape, gradient.dtype) for gradient in gradients)
        layout = self._layouts.get(key) or self._layouts.setdefault(key, GradientLayout(gradients))
        buffer = layout.take()
        weight = num_samples / (self._full_step * group.size)
        layout.fill(buffer, gradients, weight)
        group.add_up(buffer)
        total = float(buffer[-1])
        if total and abs(total - 1.0) > _EQUAL_WEIGHTS:
            buffer *= 1.0 / total
        joined = self._joined(weight / total if total else 0.0, sparse) if sparse else []
        return [*layout.split(buffer), *joined]

    def _joined(self, weight: float, parts: Sequence[Array]) -> list[Array]:
        """The rows of all ranks one behind the other, as one process would have them: values and indices in turns."""
        group = self._exchanges.group
        own = [part if index % 2 else (part * weight).astype(part.dtype) for index, part in enumerate(parts)]
        counts = group.gather(np.array([len(part) for part in own], np.int64))
        return [group.gather_rows(part, [int(count[index]) for count in counts]) for index, part in enumerate(own)]


def _parts(gradient: Any) -> tuple[Any, Any]:
    return gradient.values, gradient.indices


def _like(gradient: Any, averages: Iterator[Any], joined: Iterator[Any]) -> Any:
    """The average in the form that the gradient had. A sparse one has the rows of all ranks, also those twice.

    It makes a difference: optimizers treat rows that come twice, or not at all, in ways of their own.
    """
    import tensorflow as tf

    if gradient is None:
        return None
    if not isinstance(gradient, tf.IndexedSlices):
        return next(averages)
    return tf.IndexedSlices(next(joined), next(joined), gradient.dense_shape)
