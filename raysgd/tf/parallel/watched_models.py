"""Compiled models that train and evaluate together with those of the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.objects import registration
from raysgd.tf.objects.datasets import num_samples
from raysgd.tf.objects.replaced_methods import is_replaced, mark_replaced
from raysgd.tf.parallel.exchange_record import ExchangeRecord
from raysgd.tf.parallel.joint_metrics import JointMetrics
from raysgd.tf.parallel.sample_weights import SampleWeights
from raysgd.tf.parallel.traced_step import TracedStep, UsualStep
from raysgd.tf.parallel.watched_optimizers import WatchedOptimizers


class WatchedModels:
    """Replaces the steps and results of compiled models with watched ones."""

    def __init__(
        self,
        exchanges: ExchangeRecord,
        traced: TracedStep,
        weights: SampleWeights,
        optimizers: WatchedOptimizers,
        metrics: JointMetrics,
        scaling_losses: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._exchanges, self._traced, self._scaling_losses = exchanges, traced, scaling_losses
        self._weights, self._optimizers, self._metrics = weights, optimizers, metrics

    def watch(self, model: Any, may_be_idle: bool) -> None:
        """Makes a compiled model train and evaluate together with those of the other ranks.

        Args:
            model: The optimizers among its attributes are watched, its `train_step` tells how many samples a batch
                has, and its metrics are those of all ranks when an epoch or an evaluation ends.
            may_be_idle: Whether it may be given an empty batch in a step in which other ranks have samples.

        Raises:
            IncompatibleModelError: It is compiled with XLA, whose code cannot call out.
        """
        refuse_xla(model)
        model.jit_compile = False  # "auto" may mean XLA on a GPU
        for optimizer in registration.optimizers_in(model):
            self._optimizers.watch(optimizer)
        if is_replaced(model, "train_step"):
            return
        replacements = {
            "train_step": self._step_function(model, self._training_step(model), may_be_idle),
            "test_step": self._step_function(model, model.test_step, may_be_idle, is_test=True),
            "get_metrics_result": self._metrics.results_of(model),
        }
        for name in registration.choices_of_logs(model):
            replacements[name] = self._metrics.logs_of(model, getattr(model, name))
        for name, function in replacements.items():
            mark_replaced(function)
            object.__setattr__(model, name, function)  # past Keras, which keeps track of what models are given

    def _training_step(self, model: Any) -> Callable[[Any], Any]:
        """The `train_step` of a model, which is refused if it would train without the other ranks."""
        inner = model.train_step

        def train_step(data: Any) -> Any:
            result = inner(data)
            if not self._traced.num_applied and _has_variables_to_train(model):
                error = IncompatibleModelError(
                    f"`{type(model).__name__}.train_step` uses no optimizer that the library knows of, so each worker "
                    "would train a separate model. Keep the optimizers as attributes of the model, like "
                    "`self.optimizer`, and call their `apply_gradients`."
                )
                # Keras turns what is raised while a step is traced into another error.
                self._exchanges.note(error)
                raise error
            return result

        return train_step

    def _step_function(
        self, model: Any, step_of_user: Callable[[Any], Any], may_be_idle: bool, is_test: bool = False
    ) -> Any:
        """A step of a model with the number of samples noted, and with nothing to learn where there are none."""
        usual_step = UsualStep()

        def inner(data: Any) -> Any:
            self._weights.weigh_means(model.metrics)
            with self._scaling_losses():
                return step_of_user(data)

        def step(data: Any) -> Any:
            import tensorflow as tf

            count = num_samples(data)
            with self._traced.tracing(count, is_test):
                self._metrics.note_batch(count)
                if not may_be_idle or (_is_never_empty(data) and not tf.executing_eagerly()):
                    result = inner(data)
                    self._count_exchanges()
                    return result

                def usual() -> Any:
                    result = inner(data)
                    self._count_exchanges()
                    usual_step.note(self._traced.exchanges, result)
                    return tf.nest.map_structure(tf.convert_to_tensor, result)

                if tf.executing_eagerly():
                    return usual() if count > 0 else usual_step.repeat_with_zeros()
                return tf.cond(count > 0, usual, lambda: usual_step.repeat_with_zeros())

        return step

    def _count_exchanges(self) -> None:
        """Notes, while a step is traced, how many exchanges it has; an evaluation has none, and says nothing."""
        self._exchanges.num_per_step = self._traced.num_applied or self._exchanges.num_per_step


def refuse_xla(model: Any) -> None:
    """Refuses a model that was compiled with XLA, whose code cannot call out; "auto" does not count.

    Raises:
        IncompatibleModelError: It was.
    """
    asked = getattr(model, "_compile_config", None)
    config = getattr(asked, "config", None) or {}
    if config.get("jit_compile") is True:
        raise IncompatibleModelError(
            '`jit_compile=True` does not work with `backend="sockets"`: code that XLA compiled cannot exchange '
            'gradients. Compile the model with `jit_compile=False`, or use `backend="mwms"` with tf_keras.'
        )


def _has_variables_to_train(model: Any) -> bool:
    try:
        return bool(model.trainable_variables)
    except ValueError:  # of tf_keras, for a model that was not built and does without
        return any(layer.trainable_variables for layer in model.layers)


def _is_never_empty(data: Any) -> bool:
    import tensorflow as tf

    first = tf.nest.flatten(data)[0]
    return bool(first.shape.rank and first.shape[0])
