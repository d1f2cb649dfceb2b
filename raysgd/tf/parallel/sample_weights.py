"""The weight of this rank's share of a batch over all ranks: its samples, its losses, and means over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from raysgd._numbers.meters import as_weight
from raysgd.connections.group import Array
from raysgd.tf.objects import losses, registration
from raysgd.tf.objects.replaced_methods import is_replaced, mark_replaced
from raysgd.tf.parallel.exchange_record import ExchangeRecord
from raysgd.tf.parallel.step import TFStep
from raysgd.tf.parallel.traced_step import TracedStep

_ONE = np.float64(1.0)


class SampleWeights:
    """Weighs what this rank computes by its samples.

    Attributes:
        evaluates_together: Whether a Keras loop that evaluates has all ranks at the same joint batch.
    """

    def __init__(self, exchanges: ExchangeRecord, traced: TracedStep, step: TFStep, validation_step: TFStep) -> None:
        self._exchanges, self._traced = exchanges, traced
        self._step, self._validation_step = step, validation_step
        self.evaluates_together = False

    def num_samples_of(self, counted: int) -> float:
        """Return what our own loop knows, or what was counted in the batch; 1 where it is unknown: a plain mean."""
        known = self._step.use() if self._exchanges.group.size > 1 else self._step.num_samples
        if known is not None:
            return known
        return counted if counted >= 0 else 1

    @property
    def is_evaluation(self) -> bool:
        """True if it is a step of an evaluation that runs, or is traced."""
        return self._traced.is_test or self._validation_step.num_samples is not None

    def factor(self, divisor: Any) -> Any:
        """Return what a loss is to be multiplied by that was divided by so much, a tensor or `losses.SUM`."""
        is_sum = divisor is losses.SUM
        if self._traced.num_looked_at is not None:  # as it would be after the exchange: that of a mean
            return 1 / self._traced.num_looked_at if is_sum else 1.0
        self._traced.note(partial(self.compared, is_sum, 0.0))
        return self.compared(is_sum, 0.0 if is_sum else divisor)

    def compared(self, is_sum: bool, divisor: Any) -> Any:
        """The same factor, after the exchange of what the ranks' losses were divided by."""
        import tensorflow as tf

        compare = partial(self._compare, self._traced.is_test, is_sum)
        own = tf.stop_gradient(tf.cast(divisor, tf.float64))
        with tf.control_dependencies(self._traced.changed()):
            factor = tf.numpy_function(compare, [self._traced.num_samples_or_unknown(), own], tf.float64)
        factor.set_shape([])
        return factor

    def _compare(self, is_test: bool, is_sum: bool, count: Array, divisor: Array) -> np.float64:
        """Runs whenever the graph does. What a rank without samples computes does not count."""
        if is_test and not self.evaluates_together:
            return _ONE
        try:
            own = None if is_sum else as_weight("weight", float(divisor))
            if self._validation_step.use() is not None:
                return np.float64(self._validation_step.factor(own))
            return np.float64(self._factor_over_ranks(self.num_samples_of(int(count)), own))
        except BaseException as error:
            self._exchanges.note(error)
            raise

    def _factor_over_ranks(self, num_samples: float, divisor: float | None) -> float:
        own = np.array([num_samples, divisor or 0.0]) if num_samples else np.zeros(2)
        joint = own.copy()
        self._exchanges.group.add_up(joint)
        if not num_samples:
            return 0.0
        part = 1.0 if divisor is None else divisor / joint[1] if joint[1] else 0.0
        return float(part * joint[0] / num_samples)

    def weigh_means(self, metrics: Sequence[Any]) -> None:
        """Makes means count a number for the whole batch by this rank's share of the samples."""
        for metric in metrics:
            if registration.is_mean(metric) and not is_replaced(metric, "update_state"):
                update = mark_replaced(self._update_of_mean(metric.update_state))
                object.__setattr__(metric, "update_state", update)

    def _update_of_mean(self, inner: Callable[..., Any]) -> Any:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            import tensorflow as tf

            is_number = tf.TensorShape(getattr(values, "shape", ())).rank == 0
            if self._traced.num_samples is not None and sample_weight is None and is_number:
                sample_weight = 1.0 / self.factor(losses.SUM)
            return inner(values, sample_weight=sample_weight)

        return update_state
