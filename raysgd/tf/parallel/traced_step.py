"""The step of a Keras loop while it is traced: its samples, its exchanges, and the same without samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raysgd.exceptions import IncompatibleModelError

Exchange = Callable[[], object]
"""Takes part, without samples, in the work that all ranks do together in a step."""


class AppliedOptimizer:
    """An optimizer with what it was given in a step, without the numbers: it applies zeros of the same kinds."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._variables = list(variables)
        self._zeros = [_zeros_like(*pair) for pair in zip(gradients, variables, strict=True)]

    def __call__(self) -> None:
        zeros = [zero() for zero in self._zeros]
        self._optimizer.apply_gradients(list(zip(zeros, self._variables, strict=True)))


class TracedStep:
    """The step of a Keras loop that is being traced, or that runs eagerly.

    Attributes:
        num_samples: Samples in its batch, a tensor of the graph; None where no such step is being traced.
        exchanges: Those that it has had so far.
        is_test: Whether it is a step of evaluation.
    """

    def __init__(self) -> None:
        self.num_samples: Any = None
        self.exchanges: list[Exchange] = []
        self.is_test = False

    @contextmanager
    def tracing(self, num_samples: Any, is_test: bool) -> Iterator[None]:
        """Inside, a step on a batch of so many samples is traced."""
        self.num_samples, self.exchanges, self.is_test = num_samples, [], is_test
        try:
            yield
        finally:
            self.num_samples, self.exchanges, self.is_test = None, [], False

    def note(self, exchange: Exchange) -> None:
        """Notes an exchange; only ranks whose Keras draws the batches may have to repeat it."""
        if self.num_samples is not None:
            self.exchanges.append(exchange)

    @property
    def num_applied(self) -> int:
        """The number of times that gradients were applied."""
        return sum(isinstance(exchange, AppliedOptimizer) for exchange in self.exchanges)

    def num_samples_or_unknown(self) -> Any:
        """A tensor, also where no step is being traced: -1."""
        import tensorflow as tf

        return tf.constant(-1, tf.int64) if self.num_samples is None else tf.cast(self.num_samples, tf.int64)


class UsualStep:
    """The usual step of a model, for steps in which this rank has no samples."""

    def __init__(self) -> None:
        self._exchanges: Sequence[Exchange] = ()
        self._result: Any = None

    def note(self, exchanges: Sequence[Exchange], result: Any) -> None:
        """Notes the exchanges of the step, and what it returned."""
        self._exchanges, self._result = tuple(exchanges), result

    def repeat_with_zeros(self) -> Any:
        """A step without samples: as many exchanges and updates as the usual one, with gradients of zero."""
        import tensorflow as tf

        if self._result is None:
            raise IncompatibleModelError(
                "With `run_eagerly=True` the first batch must have a sample for each worker: make the batches larger."
            )
        for exchange in self._exchanges:
            exchange()
        return tf.nest.map_structure(lambda value: tf.zeros(value.shape, value.dtype), self._result)


def _zeros_like(gradient: Any, variable: Any) -> Callable[[], Any]:
    """Makes a gradient of the same kind, of zero; later, because it may be needed in another graph.

    Its shape is the variable's: a graph may know less of that of the gradient.
    """
    import tensorflow as tf

    if gradient is None:
        return lambda: None
    dtype = gradient.dtype
    if isinstance(gradient, tf.IndexedSlices):
        inner, kind, shape = gradient.values.shape[1:], gradient.indices.dtype, gradient.dense_shape
        size = None if shape is None else tf.get_static_value(shape)
        return lambda: tf.IndexedSlices(
            tf.zeros([0, *inner], dtype), tf.zeros([0], kind), None if size is None else tf.constant(size, shape.dtype)
        )
    shape = variable.shape
    return lambda: tf.zeros(shape, dtype)
