"""Facts that a loss says about itself, and what they make of the loss of a rank's share of a batch.

Gradients and losses of the ranks are averaged by samples, which is right for a loss that is the mean over the samples.
Other losses say in public what they are: the `reduction` of a loss of Keras, the mask of what it is given, the
`global_batch_size` of `tf.nn.compute_average_loss`. Each is scaled so that its average by samples is the loss of one
process on the joint batch.

`tf.clip_by_global_norm` says that it is given gradients. It clips them by the norm of their mean over all ranks: the
gradients of all ranks become smaller by one factor, so that their mean is clipped as in one process.

Why a loss is scaled by what it says: ADR 52.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

SUM = "sum"
"""Instead of what a loss was divided by: nothing."""

Factor = Callable[[Any], Any]
"""Of what this rank's loss was divided by, a tensor or `SUM`: what its loss is to be multiplied by, a tensor."""

Average = Callable[[Sequence[Any]], Sequence[Any]]
"""Of gradients of this rank: their mean over all ranks."""

_ACROSS_BATCH = ("sum_over_batch_size", "mean", "auto")


class _CallDepth(threading.local):
    """The depth at which the code of this thread is inside."""

    def __init__(self) -> None:
        self.rules: list[tuple[Factor, Average]] = []


_inside = _CallDepth()
_lock = threading.Lock()
_num_inside = 0
_replaced = ExitStack()


@contextmanager
def scaled(factor: Factor, average: Average) -> Iterator[None]:
    """Inside, in this thread, losses that are no means are multiplied by `factor`, and norms to clip by are joint."""
    _replace(+1)
    _inside.rules.append((factor, average))
    try:
        yield
    finally:
        _inside.rules.pop()
        _replace(-1)


def _replace(change: int) -> None:
    """Puts ours in the place of what reduces losses for the first that is inside, and takes it back for the last."""
    global _num_inside
    with _lock:
        _num_inside += change
        if _num_inside == 0:
            _replaced.close()
        elif _num_inside == 1 and change > 0:
            for owner, name, wrapped in _replacements():
                _replaced.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, wrapped)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Return where losses are reduced and gradients clipped: whose attribute, its name, and what takes its place."""
    import tensorflow as tf

    yield tf, "clip_by_global_norm", _clip(tf.clip_by_global_norm)
    yield tf.nn, "compute_average_loss", _average_loss(tf.nn.compute_average_loss)
    for name in ("keras", "tf_keras"):
        keras = sys.modules.get(name)
        loss_cls = getattr(getattr(keras, "losses", None), "Loss", None)
        if loss_cls is not None:
            yield loss_cls, "__call__", _loss_call(loss_cls.__call__)


def _loss_call(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        loss = inner(self, y_true, y_pred, sample_weight)
        return _times(loss, _divisor(str(self.reduction), getattr(y_pred, "_keras_mask", None), sample_weight))

    return call


def _average_loss(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
        loss = inner(per_example_loss, sample_weight, global_batch_size)
        return _times(loss, None if global_batch_size is None else SUM)

    return compute_average_loss


def _clip(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def clip_by_global_norm(t_list: Any, clip_norm: Any, use_norm: Any = None, name: Any = None) -> Any:
        import tensorflow as tf

        if use_norm is None and _inside.rules:
            _, average = _inside.rules[-1]
            use_norm = tf.linalg.global_norm(average(list(t_list)))
        return inner(t_list, clip_norm, use_norm, name)

    return clip_by_global_norm


def _divisor(reduction: str, mask: Any, sample_weight: Any) -> Any:
    """Return what a loss was divided by: `SUM` for nothing; None for the number of samples, or if not reduced."""
    import tensorflow as tf

    if reduction == "sum":
        return SUM
    if reduction in _ACROSS_BATCH:
        return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float64))
    if reduction != "mean_with_sample_weight" or (mask is None and sample_weight is None):
        return None
    if sample_weight is None:
        return tf.reduce_sum(tf.cast(mask, tf.float64))
    weights = tf.cast(tf.convert_to_tensor(sample_weight), tf.float64)
    return tf.reduce_sum(weights if mask is None else weights * tf.cast(mask, tf.float64))


def _times(loss: Any, divisor: Any) -> Any:
    import tensorflow as tf

    if divisor is None or not _inside.rules:
        return loss
    factor, _ = _inside.rules[-1]
    return loss * tf.cast(factor(divisor), loss.dtype)
