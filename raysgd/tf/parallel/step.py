"""The step of a replica: for the current batch of our own loop, or a step of a Keras loop that is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysgd.exceptions import IncompatibleModelError

Exchange = Callable[[], object]
"""Takes part, without samples, in an exchange of a step."""


@dataclass
class TFStep:
    """The current step of a replica if our own loop draws the batches.

    Attributes:
        num_samples: This rank's samples in the step, 0 for none; None if Keras's loop draws the batches, whose size
            then counts.
        num_global: Samples of all ranks in the step; 0 if unknown.
        weights: Sums of the sample weights, of this rank and of all ranks; 0 if there are none.
        began_at: Time at which drawing the batch began.
        usual: The exchanges of the last batch that had any, each to be repeated without samples.
    """

    num_samples: int | None = None
    num_global: int = 0
    weights: tuple[float, float] = (0.0, 0.0)
    began_at: float = 0.0
    usual: list[Exchange] = field(default_factory=list)
    _exchanged: list[Exchange] = field(default_factory=list)
    _waiting: list[tuple[int, int]] = field(default_factory=list)
    _is_last_waiting: bool = False

    def begin_batch(self, num_samples: int, num_global: int, weights: tuple[float, float]) -> None:
        """Begin a batch that is about to be yielded."""
        self.num_samples, self.num_global, self.weights = num_samples, num_global, weights
        if self._exchanged:
            self.usual, self._exchanged = self._exchanged, []
        self._waiting.append((num_samples, num_global))
        self._is_last_waiting = True

    def confirm(self) -> None:
        """End the step. Batches that were not trained on stay open."""
        if not self._waiting:
            self.num_samples = None

    def end_stream(self) -> None:
        """Do nothing at the end of the batches."""

    def forget(self) -> None:
        """End a call: what user code does between two calls is no step over the data."""
        self.num_samples, self._waiting, self._is_last_waiting = None, [], False

    def use(self, exchange: Exchange | None = None) -> int | None:
        """Note that a batch is trained on, and how to repeat that. Return this rank's samples in it.

        Raises:
            RuntimeError: Several batches with different numbers of samples are open, so the batch is unknown.
        """
        if len(set(self._waiting)) > 1:
            counts = ", ".join(str(own) for own, _ in self._waiting)
            raise RuntimeError(
                f"Batches of {counts} samples were drawn on this worker, so it is unknown which of them this step "
                "trains on. Draw one batch, train on it, then draw the next. To skip a batch, call "
                "`self.skip_batch()`. To draw ahead, batch with `drop_remainder=True`."
            )
        self.skip()
        if exchange is not None:
            self._exchanged.append(exchange)
        return self.num_samples

    def skip(self) -> None:
        """Note that the last batch is not trained on. Further calls do nothing."""
        if self._is_last_waiting:
            self._waiting.pop()
            self._is_last_waiting = False

    def factor(self, divisor: float | None) -> float:
        """Return the factor for a loss from the counts of the batch; 1 if they are unknown."""
        own, joint = self.weights
        if not self.num_samples or not self.num_global:
            return 1.0
        if divisor is None:
            return self.num_global / self.num_samples
        return divisor / joint * self.num_global / self.num_samples if joint and np.isclose(divisor, own) else 1.0

    is_boundary = True  # each batch is an optimizer step

    @property
    def batch(self) -> TFStep:
        """The current batch, which is the step itself; see `PlaceInStep`."""
        return self

    @property
    def is_padding(self) -> bool:
        """True if this rank has no samples in the step."""
        return self.num_samples == 0


def applying_zeros(optimizer: Any, variables: Sequence[Any], gradients: Sequence[Any]) -> Exchange:
    """Return a function that lets an optimizer apply zeros instead of the gradients of a step."""
    makers = [_zeros_like(*pair) for pair in zip(gradients, variables, strict=True)]

    def apply() -> None:
        optimizer.apply_gradients(list(zip([zeros() for zeros in makers], variables, strict=True)))

    return apply


class TracedStep:
    """The step of a Keras loop that is being traced, or that runs eagerly.

    Attributes:
        num_samples: Samples in its batch, a tensor of the graph; None if no such step is being traced.
        exchanges: Its exchanges so far.
        num_applied: Number of these that applied gradients.
        is_test: True in a step of evaluation.
    """

    def __init__(self) -> None:
        self.num_samples: Any = None
        self.exchanges: list[Exchange] = []
        self.num_applied = 0
        self.is_test = False

    @contextmanager
    def tracing(self, num_samples: Any, is_test: bool) -> Iterator[None]:
        """Trace a step on a batch of so many samples."""
        self.num_samples, self.exchanges, self.num_applied, self.is_test = num_samples, [], 0, is_test
        try:
            yield
        finally:
            self.num_samples, self.exchanges, self.num_applied, self.is_test = None, [], 0, False

    def note_exchange(self, exchange: Exchange, is_applied: bool = False) -> None:
        """Note an exchange. Only ranks whose batches Keras draws may have to repeat it."""
        if self.num_samples is not None:
            self.exchanges.append(exchange)
            self.num_applied += is_applied

    def num_samples_or_unknown(self) -> Any:
        """Return the number of samples as a tensor; -1 if no step is being traced."""
        import tensorflow as tf

        return tf.constant(-1, tf.int64) if self.num_samples is None else tf.cast(self.num_samples, tf.int64)


def repeat_with_zeros(exchanges: Sequence[Exchange], result: Any) -> Any:
    """Run a step without samples: repeat the exchanges and updates of the usual one with zero gradients.

    Args:
        exchanges: The exchanges of the usual step.
        result: Its result; None if there was no usual step.

    Raises:
        IncompatibleModelError: There was no usual step.
    """
    import tensorflow as tf

    if result is None:
        raise IncompatibleModelError(
            "With `run_eagerly=True` the first batch must have a sample for each worker: make the batches larger."
        )
    for exchange in exchanges:
        exchange()
    return tf.nest.map_structure(lambda value: tf.zeros(value.shape, value.dtype), result)


def _zeros_like(gradient: Any, variable: Any) -> Callable[[], Any]:
    """Return a function that makes a zero gradient of the same type, because another graph may need it later.

    It has the shape of the variable, because the shape of the gradient may be unknown in a graph.
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
