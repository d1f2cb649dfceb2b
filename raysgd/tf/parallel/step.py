"""A replica's current training or evaluation step: `TFStep` in raysgd's own loop, `TracedStep` in a Keras loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysgd.core.arrays.division import BETWEEN_BATCHES, BatchPlan
from raysgd.exceptions import IncompatibleModelError
from raysgd.trainer.worker.step_loop import StepRules

Exchange = Callable[[], object]
"""A function that repeats an all-reduce of a step with zeros, on a rank that has no samples."""


@dataclass
class TFStep:
    """A replica's current step in raysgd's own loop.

    Attributes:
        plan: How the current batch counts. Between steps, its numbers of samples are None. They are also None if a
            Keras loop draws the batches, because they are then counted in each batch.
        usual: Functions that repeat the all-reduces of the last step that ran any, with zero samples from this rank.
    """

    plan: BatchPlan = BETWEEN_BATCHES
    usual: list[Exchange] = field(default_factory=list)
    _exchanged: list[Exchange] = field(default_factory=list)
    _waiting: list[tuple[int | None, int | None]] = field(default_factory=list)
    _is_last_waiting: bool = False

    rules = StepRules()  # each batch is an optimizer step

    @property
    def num_samples(self) -> int | None:
        """Number of this rank's samples in the step."""
        return self.plan.num_samples

    def begin_batch(self, plan: BatchPlan) -> None:
        """Start a step with the sample counts of its batch. Call this before the batch is yielded to user code."""
        self.plan = plan
        if self._exchanged:
            self.usual, self._exchanged = self._exchanged, []
        self._waiting.append((plan.num_samples, plan.total_samples))
        self._is_last_waiting = True

    def confirm(self) -> None:
        """End the step, unless user code has drawn a batch on which it has not trained yet."""
        if not self._waiting:
            self.plan = BETWEEN_BATCHES

    def end_data(self) -> None:
        """Do nothing. Called when a training call has no more batches."""

    def forget(self) -> None:
        """Forget the batches that user code has drawn without training on them.

        Call this when a training or validation call ends.

        Otherwise, a step that user code takes between two calls would count as a step on such a batch.
        """
        self.plan, self._waiting, self._is_last_waiting = BETWEEN_BATCHES, [], False

    def use(self, exchange: Exchange | None = None) -> int | None:
        """Record that user code trains on the batch that it has drawn. Return this rank's number of samples in it.

        Return None if no step of raysgd's own loop is running.

        Args:
            exchange: Function that repeats an all-reduce of this step with zero samples from this rank. It is recorded
                for later steps.

        Raises:
            RuntimeError: User code has drawn several batches with different numbers of samples, so it is unknown which
                of them it trains on.
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
        """Record that user code has trained on the last batch or skips it. Further calls do nothing."""
        if self._is_last_waiting:
            self._waiting.pop()
            self._is_last_waiting = False

    def factor(self, divisor: float | None) -> float:
        """Return the factor by which to scale a loss on this rank, computed from `plan`.

        No all-reduce is needed. Return 1 if the counts are unknown, if this rank has no samples, or if the divisor is
        not this rank's sum of sample weights.

        Args:
            divisor: The loss's divisor on this rank, or None for a loss that is a sum.
        """
        num_samples, total, (own, joint) = self.plan.num_samples, self.plan.total_samples, self.plan.sample_weights
        if not num_samples or not total:
            return 1.0
        if divisor is None:
            return total / num_samples
        return divisor / joint * total / num_samples if joint and np.isclose(divisor, own) else 1.0


def applying_zeros(optimizer: Any, variables: Sequence[Any], gradients: Sequence[Any]) -> Exchange:
    """Return a function that makes an optimizer take a step with zeros in place of this rank's gradients."""
    makers = [_zeros_like(*pair) for pair in zip(gradients, variables, strict=True)]

    def apply() -> None:
        optimizer.apply_gradients(list(zip([zeros() for zeros in makers], variables, strict=True)))

    return apply


@contextmanager
def assigned(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values inside the block."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


class TracedStep:
    """The step of a Keras loop that is being traced, or that runs eagerly.

    Attributes:
        num_samples: Number of samples in the step's batch, as a tensor of the graph. None if no step is being traced.
        exchanges: Functions that repeat the step's all-reduces so far.
        num_applied: Number of all-reduces in the step whose averaged gradients an optimizer applies.
        is_test: True in an evaluation step.
    """

    def __init__(self) -> None:
        self.num_samples: Any = None
        self.exchanges: list[Exchange] = []
        self.num_applied = 0
        self.is_test = False

    def tracing(self, num_samples: Any, is_test: bool) -> AbstractContextManager[None]:
        """Use this around a step that is traced or runs eagerly, to record its all-reduces.

        Args:
            num_samples: Number of samples in the step's batch.
            is_test: True in an evaluation step.
        """
        return assigned(self, num_samples=num_samples, exchanges=[], num_applied=0, is_test=is_test)

    def note_exchange(self, exchange: Exchange, is_applied: bool = False) -> None:
        """Record an all-reduce of the step that is being traced. Do nothing if no step is being traced.

        Args:
            exchange: Function that repeats the all-reduce with zero samples from this rank.
            is_applied: True if an optimizer applies the averaged gradients.
        """
        if self.num_samples is not None:
            self.exchanges.append(exchange)
            self.num_applied += is_applied

    def num_samples_or_unknown(self) -> Any:
        """Return the number of samples in the traced step's batch as a tensor, or -1 if no step is being traced."""
        import tensorflow as tf

        return tf.constant(-1, tf.int64) if self.num_samples is None else tf.cast(self.num_samples, tf.int64)


def repeat_with_zeros(exchanges: Sequence[Exchange], result: Any) -> Any:
    """Run a step without samples: repeat the usual step's all-reduces with zero gradients from this rank.

    The optimizers apply the averages of the other ranks' gradients, as in the usual step. Return zeros in the structure
    of `result`.

    Args:
        exchanges: Functions that repeat the all-reduces of a usual step, which is a step on a non-empty batch.
        result: Result of the usual step, or None if there has not been one.

    Raises:
        IncompatibleModelError: There has not been a usual step.
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
    """Return a function that creates a zero gradient, dense or sparse like the given gradient.

    The result is a function, because a tensor that is created now could not be used in another graph later. A dense
    zero gradient gets the shape of the variable, because the shape of the gradient may be unknown in a graph.
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
