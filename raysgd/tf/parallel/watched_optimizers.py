"""Optimizers that average the gradients of all ranks before they use them, and refusals of those that would not.

Why gradients are averaged around the optimizer instance: ADR 31.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raysgd.exceptions import InvalidRegistrationError
from raysgd.tf.objects import registration
from raysgd.tf.objects.replaced_methods import is_replaced, mark_replaced
from raysgd.tf.parallel.exchange_record import ExchangeRecord
from raysgd.tf.parallel.gradient_averager import GradientAverager
from raysgd.tf.parallel.traced_step import AppliedOptimizer, TracedStep


class WatchedOptimizers:
    """The optimizers of one replica that are watched.

    Attributes:
        registered: Says which models the optimizers may train; nothing is refused where it is None.
    """

    def __init__(
        self, exchanges: ExchangeRecord, traced: TracedStep, new_averager: Callable[[], GradientAverager]
    ) -> None:
        self._exchanges, self._traced, self._new_averager = exchanges, traced, new_averager
        self.registered: Callable[[], Sequence[Any]] | None = None
        self._averagers: list[GradientAverager] = []

    def forget_full_steps(self) -> None:
        """Takes the next step of each for a full one."""
        for averager in self._averagers:
            averager.forget_full_step()

    def watch(self, optimizer: Any) -> None:
        """Makes an optimizer average the gradients of all ranks; once, however often it is called."""
        name = _name_of_apply(optimizer)
        if is_replaced(optimizer, name):
            return
        wrapper = self._apply if name == "apply" else self._apply_gradients
        import tensorflow as tf

        self._averagers.append(self._new_averager())
        wrapped = wrapper(optimizer, getattr(optimizer, name), self._averagers[-1])
        wrapped = mark_replaced(tf.autograph.experimental.do_not_convert(wrapped))
        setattr(optimizer, name, wrapped)  # of the instance: its class, which a saved model names, does not change

    def require_watched(self, optimizer: Any) -> None:
        """Refuses an optimizer that would step with this rank's gradients alone.

        Raises:
            InvalidRegistrationError: It was not registered.
        """
        if not is_replaced(optimizer, _name_of_apply(optimizer)):
            self._refuse(
                f"`self.optimizer` is a `{type(optimizer).__name__}` that was not registered, so each worker would "
                "train a separate model. Call `register` with it, also when you replace an optimizer later, and use "
                "what it returns."
            )

    def _refuse_strangers(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Refuses to train what no registered model has: it would not be saved, or handed to a worker that steps in."""
        if self._exchanges.group.size == 1 or self.registered is None:
            return
        strangers = registration.variables_outside(self.registered(), variables)
        if strangers:
            self._refuse(
                f"`{type(optimizer).__name__}` trains variables of no registered model: {', '.join(strangers)}. They "
                "would be neither saved nor given to workers that step in. Make them with `add_weight` of a layer, and "
                "register the layer too: `register(models=[model, layer], ...)`."
            )

    def _refuse(self, message: str) -> None:
        """Raises, and remembers what: TensorFlow turns an error in a step that is traced into another one."""
        error = InvalidRegistrationError(message)
        self._exchanges.note(error)
        raise error

    def _apply(self, optimizer: Any, inner: Callable[..., Any], averager: GradientAverager) -> Any:
        """Keras 3."""

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            import tensorflow as tf

            gradients = list(grads)
            variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            with tf.init_scope():  # what is made in a branch of a graph would stay without a value
                registration.build_optimizer(optimizer, variables)
            averaged = self._averaged(optimizer, variables, gradients, averager)
            with _after(averaged):
                return inner(averaged, trainable_variables)

        return apply

    def _apply_gradients(self, optimizer: Any, inner: Callable[..., Any], averager: GradientAverager) -> Any:
        """tf_keras."""

        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
            averaged = self._averaged(optimizer, variables, gradients, averager)
            with _after(averaged):
                return inner(list(zip(averaged, variables, strict=True)), *args, **kwargs)

        return apply_gradients

    def _averaged(
        self, optimizer: Any, variables: list[Any], gradients: list[Any], averager: GradientAverager
    ) -> list[Any]:
        """The gradients of all ranks. What is applied is noted of the step that is traced."""
        self._refuse_strangers(optimizer, variables)
        self._traced.show(gradients)
        self._traced.note(AppliedOptimizer(optimizer, variables, gradients))
        return averager.average(gradients)


def _name_of_apply(optimizer: Any) -> str:
    """Return what applies gradients: of Keras 3, and of tf_keras."""
    return "apply" if hasattr(optimizer, "apply") else "apply_gradients"


def _after(averaged: Sequence[Any]) -> Any:
    """Return where nothing is done before the exchange is: a step that breaks off has not even counted itself."""
    import tensorflow as tf

    first = next((gradient for gradient in averaged if gradient is not None), None)
    return tf.control_dependencies([] if first is None else [first])
