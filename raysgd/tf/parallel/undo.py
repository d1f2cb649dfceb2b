"""Undoes what an interrupted step of Keras's `fit` has changed before its all-reduce: non-trainable weights."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any


class StepUndo:
    """Copies a model's non-trainable weights at the start of each step, as part of the traced step.

    A step changes trainable weights only after its all-reduce. Other weights may change in the forward pass.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # by ID of a weight: the weight, and the variable with its copy
        self._is_open: Any = None  # TensorFlow variable: True from the start of a step until its all-reduce

    def begin_step(self, weights: Iterable[Any]) -> AbstractContextManager[Any]:
        """Copy the weights. Operations that are created inside the returned context manager run after that."""
        import tensorflow as tf

        weights = list(weights)
        with tf.init_scope():  # outside the graph, which may be traced several times
            if self._is_open is None:
                self._is_open = tf.Variable(False, trainable=False)
            for weight in weights:
                if id(weight) not in self._copies:
                    copy = tf.Variable(weight.numpy(), trainable=False, dtype=weight.dtype)
                    self._copies[id(weight)] = weight, copy
        copied = [self._copies[id(weight)][1].assign(tf.convert_to_tensor(weight)) for weight in weights]
        with tf.control_dependencies(copied):
            return tf.control_dependencies([self._is_open.assign(True)])

    def end_step(self) -> None:
        """Record that the step's all-reduce is done. Call this where operations run only after the all-reduce."""
        if self._is_open is not None:
            self._is_open.assign(False)

    @property
    def _is_interrupted(self) -> bool:
        return self._is_open is not None and bool(self._is_open.numpy())

    def restore(self) -> None:
        """Restore the weights if a step was interrupted before its all-reduce was done."""
        if self._is_interrupted:
            for weight, copy in self._copies.values():
                weight.assign(copy.numpy())
            self._is_open.assign(False)

    def values_of(self, weights: Iterable[Any]) -> list[Any]:
        """Return the weights, with the copies in place of weights that the running step may have changed."""
        copies = self._copies if self._is_interrupted else {}
        return [copies[id(weight)][1] if id(weight) in copies else weight for weight in weights]
