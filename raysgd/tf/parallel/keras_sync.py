"""Keeps the replicas of Keras models equal: gradients are averaged around the optimizer, metrics merged by their state.

Each process has its own model and no strategy. An optimizer that is watched averages the gradients of all ranks
before it uses them: one exchange for each step, in one flat buffer. It works for Keras 3 and for tf_keras, for `fit`,
`train_on_batch` and loops with a `GradientTape`, in graphs and eagerly.

The average is by samples: a rank's gradient counts by the samples that it is the mean of. So a step of N replicas is
the step of one process on the joint batch, however unevenly the samples fall on them. A rank without samples takes
part with weight 0.

Why gradients are averaged around the optimizer instance: ADR 31.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from raysgd.connections.group import Group
from raysgd.connections.tensorflow import group_of
from raysgd.engine.shared.types import World
from raysgd.tf.objects import losses
from raysgd.tf.parallel import mean_check
from raysgd.tf.parallel.exchange_record import ExchangeRecord
from raysgd.tf.parallel.gradient_averager import GradientAverager
from raysgd.tf.parallel.joint_metrics import JointMetrics
from raysgd.tf.parallel.sample_weights import SampleWeights
from raysgd.tf.parallel.step import TFStep
from raysgd.tf.parallel.traced_step import TracedStep, zeros_like
from raysgd.tf.parallel.watched_models import WatchedModels
from raysgd.tf.parallel.watched_optimizers import WatchedOptimizers


class Synchronizer:
    """Watches optimizers and models of one replica.

    Args:
        world: The place among the replicas.
        watches: Whether to watch models and optimizers also of a replica that is alone: others may join it later, or
            its steps have to be counted.

    Attributes:
        step: The step of training, where our own loop hands the batches out.
        validation_step: The same in an evaluation, where each rank goes through its batches for itself.
        exchanges: Counts and times the exchanges of gradients.
        watches: Whether it does anything at all; models of a replica that stays alone are left as they are.
    """

    def __init__(self, world: World, watches: bool = False) -> None:
        self.watches = world.is_distributed or watches
        self.step, self.validation_step = TFStep(), TFStep()
        self.exchanges = ExchangeRecord(group_of(world))
        self._traced = traced = TracedStep()
        self._weights = SampleWeights(self.exchanges, traced, self.step, self.validation_step)
        new_averager = partial(GradientAverager, self.exchanges, traced, self._weights)
        self._averager = new_averager()  # for what is not watched; one for a replica: ranks retrace at different times
        self._optimizers = WatchedOptimizers(self.exchanges, traced, new_averager)
        self._metrics = JointMetrics(self.exchanges, traced)
        self._models = WatchedModels(
            self.exchanges, traced, self._weights, self._optimizers, self._metrics, self.scaling_losses
        )

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.exchanges.group

    def rejoin(self, world: World) -> None:
        """Goes on with another group, which all its ranks have joined already; what is watched stays watched."""
        self.exchanges.group = group_of(world)
        self._averager.forget_full_step()
        self._optimizers.forget_full_steps()

    def restrict_to(self, registered: Callable[[], Sequence[Any]]) -> None:
        """Refuses, from now on, optimizers that train variables of other models than those."""
        self._optimizers.registered = registered

    def watch(self, optimizer: Any) -> None:
        """Makes an optimizer average the gradients of all ranks; once, however often it is called."""
        if self.watches:
            self._optimizers.watch(optimizer)

    def require_watched(self, optimizer: Any) -> None:
        """Refuses an optimizer that would step with this rank's gradients alone.

        Raises:
            InvalidRegistrationError: It was not registered.
        """
        if self.watches:
            self._optimizers.require_watched(optimizer)

    def watch_model(self, model: Any, may_be_idle: bool) -> None:
        """Makes a compiled model train and evaluate together with those of the other ranks, see `WatchedModels`."""
        if self.watches:
            self._models.watch(model, may_be_idle)

    def warn_of_sum(self, step: Callable[[Any], Any], element_spec: Any, models: Sequence[Any]) -> None:
        """Warns on rank 0 if the loss that a step takes the gradients of is no mean over the samples."""
        if self.group.rank == 0 and self.group.size > 1:
            with self.scaling_losses():
                mean_check.warn_of_sum(step, element_spec, models, self._traced)

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """The mean of the ranks' gradients by samples; None stays None. For optimizers that are not watched."""
        return self._averager.average(gradients) if self.watches else list(gradients)

    def scaling_losses(self) -> AbstractContextManager[None]:
        """Inside, losses that are no means over the samples are scaled, see `losses`; with what all ranks have."""
        return losses.scaled(self._weights.factor, self._averaged_to_clip) if self.watches else nullcontext()

    def _averaged_to_clip(self, gradients: Sequence[Any]) -> Sequence[Any]:
        if self._traced.num_looked_at is not None:
            return [0.0]  # not clipped
        if self._weights.is_evaluation:  # in which no rank waits for others
            return gradients
        average, zeros = partial(self._averager.average, is_step=False), [zeros_like(each, each) for each in gradients]
        self._traced.note(lambda: average([zero() for zero in zeros]))
        return average(gradients)

    def weighted(self, loss: Any, weight: Any) -> Any:
        """A loss that is the mean over so much, so scaled that it counts by that over all ranks."""
        import tensorflow as tf

        return loss * tf.cast(self._weights.factor(weight), loss.dtype) if self.watches else loss

    def merging_metrics(self) -> AbstractContextManager[None]:
        """Inside, the results of models that are watched are those of all ranks whenever an epoch ends."""
        return self._metrics.merging()

    @contextmanager
    def fitting(self, before_exchange: Callable[[], None]) -> Iterator[None]:
        """Inside, a Keras loop trains, and `before_exchange` is called ahead of each exchange of gradients."""
        self.exchanges.before_exchange = before_exchange
        try:
            yield
        finally:
            self.exchanges.before_exchange, self._weights.evaluates_together = None, False

    @contextmanager
    def evaluating(self, together: bool) -> Iterator[None]:
        """Inside, a Keras loop evaluates; all ranks the same joint batches, or each one its own."""
        self._weights.evaluates_together = together
        try:
            yield
        finally:
            self._weights.evaluates_together = False
