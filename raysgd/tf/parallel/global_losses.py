"""Scales each rank's losses so that their sample-weighted average equals the single-process loss.

The ranks' gradients and losses are averaged by samples, which is correct for a loss that is the mean over samples. A
loss may have another divisor, the number by which its sum is divided. For a Keras loss, its `reduction`, the mask of
its inputs, and `ignore_class` determine the divisor. Such a loss is multiplied by

    (its divisor on this rank / on all ranks) / (samples on this rank / on all ranks)

in `compute_loss` of a compiled model, or in an operator's default `forward`. For a loss that is a sum, the first
fraction is 1. A loss is rejected if its divisor cannot be determined.

ADR 31 explains why a loss is scaled by its own attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from raysgd.core.connections.group import Array
from raysgd.core.numbers.meters import as_weight
from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.objects import registration
from raysgd.tf.parallel.averaging import REFUSALS, ExchangeRecord
from raysgd.tf.parallel.step import Exchange, TFStep, TracedStep

SUM = "sum"
"""Passed in place of a divisor if the loss is a sum, which has no divisor."""

_BY_WEIGHTS = "mean_with_sample_weight"
_ONE = np.float64(1.0)


class GlobalLosses:
    """Scales this rank's losses so that their sample-weighted average over all ranks is the loss of the global batch.

    Attributes:
        evaluates_together: True while a Keras loop evaluates and each rank has its part of the same global batches.
        registered: Loss that the operator has registered, or None.
        is_scaled: True if this object has scaled a loss in the operator's current step.
    """

    def __init__(self, exchanges: ExchangeRecord, traced: TracedStep, step: TFStep, validation_step: TFStep) -> None:
        self._exchanges, self._traced = exchanges, traced
        self._step, self._validation_step = step, validation_step
        self.evaluates_together = False
        self.registered: Any = None
        self.is_scaled = False

    def refuse_unscaled(self) -> None:
        """Reject a step in which user code calls the registered loss itself, if the loss is no mean over samples.

        Raises:
            IncompatibleModelError: The loss is a sum, or divides by weights or by labels, and no loss was scaled.
        """
        loss, reduction = self.registered, _reduction_of(self.registered)
        option = f"{reduction=}" if reduction in (SUM, _BY_WEIGHTS) else f"ignore_class={_ignored_by(loss)}"
        if self.is_scaled or option == "ignore_class=None":
            return
        raise IncompatibleModelError(
            f"`register(loss={type(loss).__name__}({option}))` is no mean over samples, and your own `forward` or step "
            "computes the loss without raysgd, which cannot work with several workers. Call `super().forward(...)`, or "
            'use `reduction="sum_over_batch_size"`. For a mean over anything else than samples, return `(output, loss, '
            "weight)` from `forward`, or take the gradient of `self.weighted_loss(loss, weight)` in your own step. If "
            "you do not use the loss, do not register it."
        )

    def num_samples_of(self, counted: int, repeat: Exchange) -> float:
        """Return this rank's number of samples in the current step.

        If raysgd's loop draws the batches, return the number that the loop has recorded. Otherwise, return `counted`,
        or 1 if `counted` is -1.

        Args:
            counted: Number of samples counted in the batch by a step of a Keras loop. -1 if no such step runs.
            repeat: Function that repeats the current all-reduce with zero samples from this rank. It is recorded for
                later steps in which this rank has no samples.
        """
        known = self._step.use(repeat) if self._exchanges.group.size > 1 else self._step.num_samples
        if known is not None:
            return known
        return counted if counted >= 0 else 1

    def compute_loss_of(self, model: Any) -> Callable[..., Any]:
        """Return a replacement for a model's `compute_loss` that scales the loss of each model output.

        To scale a loss, the replacement multiplies the loss's sample weights by a factor.
        """
        inner = model.compute_loss

        def compute_loss(
            x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, *more: Any, **named: Any
        ) -> Any:
            with self._exchanges.noting(*REFUSALS):
                weights, by_weights = self._scaled_weights(model, y, y_pred, sample_weight)
            with _as_sums(by_weights):
                return inner(x, y, y_pred, weights, *more, **named)

        return compute_loss

    def _scaled_weights(self, model: Any, y: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
        """Return sample weights that scale the losses of a model's outputs.

        Also return the losses whose reduction must be changed from a mean to a sum, because the returned sample weights
        already include the divisor of this mean.
        """
        import tensorflow as tf

        own_losses = [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if loss is not None]
        if not own_losses or y_pred is None:
            return sample_weight, []
        outputs, keras = tf.nest.flatten(y_pred), registration.keras_of(model)
        losses = [_named(keras, loss) for loss in _by_output(model, "loss", model.loss, y_pred)]
        weights = _by_output(model, "sample_weight", sample_weight, y_pred)
        looks_at_y = any(not registration.is_stock(loss) or _ignored_by(loss) is not None for loss in losses)
        targets = _by_output(model, "y", y if looks_at_y else None, y_pred)
        for loss, target, output in zip(losses, targets, outputs, strict=True):
            self._refuse_over_batch(keras, loss, target, output)
        parts = zip(losses, targets, outputs, weights, strict=True)
        scales = [None if loss is None else self._scale(keras, loss, *rest) for loss, *rest in parts]
        if all(scale is None for scale in scales):
            return sample_weight, []
        dtype = keras.backend.floatx()
        ones = [1.0 if weight is None else tf.cast(weight, dtype) for weight in weights]
        scaled = [
            tf.cast(1.0 if scale is None else scale, dtype) * one for scale, one in zip(scales, ones, strict=True)
        ]
        by_weights = [loss for loss in losses if _reduction_of(loss) == _BY_WEIGHTS]
        return tf.nest.pack_sequence_as(y_pred, scaled), by_weights

    def _scale(self, keras: Any, loss: Any, target: Any, output: Any, weight: Any) -> Any:
        """Return the factor by which to multiply a loss's sample weights, or None if the loss needs no scaling.

        If the loss is a mean weighted by sample weights, the factor also divides by the sum of these weights.
        """
        import tensorflow as tf

        if _reduction_of(loss) == SUM:
            return self.factor(SUM)
        divisor = _divisor(keras, loss, target, output, weight)
        if divisor is None:
            return None
        scale = self.factor(divisor)
        if _reduction_of(loss) != _BY_WEIGHTS:
            return scale
        return tf.math.divide_no_nan(scale, tf.cast(divisor, scale.dtype))

    def mean(self, loss: Any, target: Any, output: Any, weight: Any) -> Any:
        """Return a batch's mean loss, scaled so that its sample-weighted average over ranks is the global loss.

        Raises:
            IncompatibleModelError: The loss is a function that returns a scalar, or it combines samples of a batch.
        """
        import tensorflow as tf

        self.is_scaled = True
        value, reduction = loss(target, output) if weight is None else loss(target, output, weight), _reduction_of(loss)
        with self._exchanges.noting(*REFUSALS):
            if reduction is None:
                _refuse_rank_0(loss, value)
                return tf.reduce_mean(value)
            keras = registration.keras_of(loss)
            self._refuse_over_batch(keras, loss, target, output)
        divisor = SUM if reduction == SUM else _divisor(keras, loss, target, output, weight)
        value = tf.reduce_mean(value)
        return value if divisor is None else value * tf.cast(self.factor(divisor), value.dtype)

    def _refuse_over_batch(self, keras: Any, loss: Any, target: Any, output: Any) -> None:
        """Reject a loss that combines samples of a batch, so that a sample has no separate value.

        The number of values that a user's own loss returns must be a multiple of the number of samples. If one of these
        numbers is unknown while the step is traced, the check runs in each step instead.
        """
        import tensorflow as tf

        if loss is None:
            return
        if registration.is_stock(loss):
            _refuse_axes(loss, output)
            return
        values = _values_of(keras, loss, target, output)
        _refuse_rank_0(loss, values)
        if not all(isinstance(each, tf.Tensor) and each.shape.rank for each in (values, output)):
            return
        number, num_samples = values.shape[0], output.shape[0] or getattr(target, "shape", [None])[0]
        if number is not None and number == num_samples:
            return

        def refuse() -> None:
            with self._exchanges.noting(*REFUSALS):
                raise _without_values(loss, "`tf.reduce_mean(errors, axis=-1)`, with 0 for samples that do not count")

        if number is not None and num_samples is None:
            refuse()
        is_uneven = tf.shape(values)[0] % tf.maximum(tf.shape(output)[0], 1) != 0
        tf.cond(is_uneven, lambda: tf.group(tf.numpy_function(refuse, [], [])), tf.no_op)

    def weighted(self, loss: Any, weight: Any) -> Any:
        """Scale a loss that the user has computed as a mean over `weight` units, such as tokens."""
        import tensorflow as tf

        self.is_scaled |= _reduction_of(self.registered) != SUM
        return loss * tf.cast(self.factor(weight), loss.dtype)

    def factor(self, divisor: Any) -> Any:
        """Return the factor by which to scale a loss on this rank, as a tensor.

        Whenever the tensor is computed in a training step, the ranks all-reduce their numbers of samples and their
        divisors.

        Args:
            divisor: The loss's divisor on this rank, or `SUM` if the loss is a sum.
        """
        is_sum = divisor is SUM
        self._traced.note_exchange(partial(self._compared, is_sum, 0.0))
        return self._compared(is_sum, 0.0 if is_sum else divisor)

    def _compared(self, is_sum: bool, divisor: Any) -> Any:
        """Return the same tensor as `factor`, but do not record the all-reduce in the step that is being traced."""
        import tensorflow as tf

        compare = partial(self._compare, self._traced.is_test, is_sum)
        own = tf.stop_gradient(tf.cast(divisor, tf.float64))
        factor = tf.numpy_function(compare, [self._traced.num_samples_or_unknown(), own], tf.float64)
        factor.set_shape([])
        return factor

    def _compare(self, is_test: bool, is_sum: bool, count: Array, divisor: Array) -> np.float64:
        """Return this rank's factor. To compute it, the ranks all-reduce their numbers of samples and their divisors.

        TensorFlow calls this each time that the graph runs. On a rank without samples, the factor is 0. An evaluation
        needs no all-reduce, unless a Keras loop evaluates and each rank has its part of the same global batches.
        """
        if is_test and not self.evaluates_together:
            return _ONE
        with self._exchanges.noting(BaseException):
            own = None if is_sum else as_weight("weight", float(divisor))
            if self._validation_step.use() is not None:
                return np.float64(self._validation_step.factor(own))
            repeat = partial(self._compared, is_sum, 0.0)
            num_samples = self.num_samples_of(int(count), repeat)
            of_all = np.array([num_samples, own or 0.0]) if num_samples else np.zeros(2)
            self._exchanges.group.add_up(of_all)
            if not num_samples:
                return np.float64(0.0)
            part = 1.0 if own is None else own / of_all[1] if of_all[1] else 0.0
            return np.float64(part * of_all[0] / num_samples)


def refuse_by_name(gradients: Sequence[Any]) -> None:
    """Reject gradients that a user's step has computed in a way that is wrong with several ranks.

    These are gradients clipped by `tf.clip_by_global_norm`, and gradients of a loss from `tf.nn.compute_average_loss`.
    Both kinds of gradients are recognized by the operations in the graph. In eager mode, nothing is checked.

    Raises:
        IncompatibleModelError: The graph being traced contains such an operation.
    """
    import tensorflow as tf

    tensors = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
    if not tensors or tf.executing_eagerly():
        return
    if any("clip_by_global_norm" in tensor.name for tensor in tensors):
        raise IncompatibleModelError(
            "`tf.clip_by_global_norm` in your own step clips by the gradients of one worker. Remove it, and let the "
            "optimizer clip the mean over all workers: `global_clipnorm=...`."
        )
    divided = [one for one in tensors[0].graph.get_operations() if one.type == "DivNoNan"]
    if any(frame.name == "compute_average_loss" for one in divided for frame in one.traceback):
        raise IncompatibleModelError(
            "`tf.nn.compute_average_loss` in your own step divides by samples that one worker does not have. Use a "
            'loss of Keras with `reduction="sum_over_batch_size"` and `sample_weight`, or `tf.reduce_mean`.'
        )


def _reduction_of(loss: Any) -> str | None:
    """Return a Keras loss's reduction. Return None if `loss` is a function or a string that names a loss."""
    reduction = getattr(loss, "reduction", None)
    return None if reduction is None and not hasattr(loss, "call") else str(reduction)


def _ignored_by(loss: Any) -> int | None:
    """Return the class index that a Keras loss ignores, or None."""
    return loss.get_config().get("ignore_class") if hasattr(loss, "get_config") else None


def _divisor(keras: Any, loss: Any, target: Any, output: Any, weight: Any) -> Any:
    """Return a loss's divisor as a tensor. Return None if the divisor is the number of samples or there is no divisor.

    The divisor is computed as the sum of another Keras loss, whose values are all 1, or 0 for an ignored class. Keras
    applies the same mask and weights to both losses. The sum is therefore the number of values, or the sum of weights,
    by which Keras divides.
    """
    import tensorflow as tf

    reduction, is_by_weights = _reduction_of(loss), _reduction_of(loss) == _BY_WEIGHTS
    ignored = _ignored_by(loss)
    if reduction in ("none", "None") or not (is_by_weights or ignored is not None or _is_masked(keras, output)):
        return None

    def valid(y_true: Any, y_pred: Any) -> Any:
        shape = tf.shape(y_pred)[: max(1, (y_pred.shape.rank or 2) - 1)]
        if ignored is None:
            return tf.ones(shape, y_pred.dtype)
        return tf.cast(tf.reshape(tf.cast(y_true, tf.int64), shape) != ignored, y_pred.dtype)

    return _counting(keras, valid, SUM)(0.0 if ignored is None else target, output, weight if is_by_weights else None)


def _is_masked(keras: Any, output: Any) -> bool:
    """Return True if Keras would apply a mask to a loss of this output.

    In eager mode, always return True. There, the answer could differ between ranks with batches of different shapes,
    but all ranks must run the same all-reduces.
    """
    import tensorflow as tf

    ones = tf.ones([1] * max(1, (output.shape.rank or 2) - 1), output.dtype)
    shape = _counting(keras, lambda *_: ones, "none")(0.0, output).shape
    return tf.executing_eagerly() or shape.rank is None or any(size != 1 for size in shape)


def _counting(keras: Any, values: Callable[[Any, Any], Any], reduction: str) -> Any:
    """Return a Keras loss that computes values with the function `values`, and then applies the given reduction."""

    class Counting(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return values(y_true, y_pred)

    return Counting(reduction=reduction)


def _named(keras: Any, loss: Any) -> Any:
    """Return a loss unchanged, or the Keras loss function with this name if the loss is a string."""
    return keras.losses.get(loss) if isinstance(loss, str) else loss


def _refuse_axes(loss: Any, output: Any) -> None:
    """Reject a Keras loss that combines several samples of a batch, such as one whose `axis` is the batch dimension."""
    kind = _name_of(loss)
    default = None if kind.lower() in ("dice", "tversky") else -1
    axes = loss.get_config().get("axis", default) if hasattr(loss, "get_config") else default
    if kind.lower() == "circle":
        raise _without_values(loss, "another loss, or train with `num_workers=1`")
    rank = output.shape.rank or 2
    if axes is None or any(axis % rank == 0 for axis in np.atleast_1d(axes)):
        of_sample = -1 if rank == 2 else tuple(range(1, rank))
        raise _without_values(loss, f"`keras.losses.{kind[0].upper()}{kind[1:]}(axis={of_sample})`")


def _without_values(loss: Any, advice: str) -> IncompatibleModelError:
    return IncompatibleModelError(
        f"the loss `{_name_of(loss)}` has no value for each sample, so a worker cannot compute it on its shard of the "
        f"batch. Use {advice}. The library takes the mean."
    )


def _values_of(keras: Any, loss: Any, target: Any, output: Any) -> Any:
    """Return the values that a user's loss computes for a batch, before Keras reduces them to a scalar."""
    inner, results = getattr(loss, "call", loss), []

    def values(y_true: Any, y_pred: Any) -> Any:
        results.append(inner(y_true, y_pred))
        return results[-1]

    _counting(keras, values, "none")(target, output)  # calls `values` with arguments converted as Keras does
    return results[-1]


def _refuse_rank_0(loss: Any, values: Any) -> None:
    if getattr(values, "shape", None) is not None and values.shape.rank == 0:
        raise IncompatibleModelError(
            f"the loss `{_name_of(loss)}` returns a scalar, and workers cannot tell a mean from a sum. Return one "
            "value for each sample: `tf.reduce_mean(errors, axis=-1)`. The library takes the mean."
        )


def _name_of(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def _by_output(model: Any, name: str, entries: Any, outputs: Any) -> list[Any]:
    """Return a list with one entry for each model output, from the user's losses, targets or sample weights.

    Entries are matched with outputs in the same way as in Keras.

    Args:
        model: The model.
        name: Name of the given argument, for error messages.
        entries: One entry for all outputs, or a container of entries.
        outputs: The model's outputs.
    """
    import tensorflow as tf

    num_outputs = len(tf.nest.flatten(outputs))
    if entries is None or not tf.nest.is_nested(entries):
        return [entries] * num_outputs
    if isinstance(entries, Mapping):
        names = sorted(outputs) if isinstance(outputs, Mapping) else model.output_names
        parts = [entries.get(one) for one in names]
    else:
        parts = tf.nest.flatten(entries)
    if len(parts) != num_outputs:
        raise IncompatibleModelError(
            f"`{name}` has {len(parts)} entries, but the model has {num_outputs} outputs: pass one for each output, in "
            "the same structure as the model's outputs, so that workers can match them."
        )
    return parts


@contextmanager
def _as_sums(losses: Sequence[Any]) -> Iterator[None]:
    """Inside the block, change the reduction of losses from a weighted mean to a sum.

    Their sample weights already include the divisor of the mean.
    """
    for loss in losses:
        loss.reduction = SUM
    try:
        yield
    finally:
        for loss in losses:
            loss.reduction = _BY_WEIGHTS
