"""A check whether the loss of a step is the mean over its samples: else N workers are not one process.

The gradients of a few samples are compared with those of the same samples twice in one batch. Those of a mean are the
same, those of a sum are twice as large. Random numbers are drawn alike, but for half of the samples in the larger one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from raysgd.tf.objects import rng
from raysgd.tf.objects.datasets import num_samples
from raysgd.tf.parallel.joint_metrics import variables_of
from raysgd.tf.parallel.traced_step import GradientsFound, TracedStep

logger = logging.getLogger(__name__)

_NUM_SAMPLES = 8
_NUM_TRIES = 4
_LARGEST_OF_MEAN = 1.3
"""The factor by which gradients of a mean may seem larger in each try, by random numbers such as those of dropout."""


def warn_of_sum(step: Callable[[Any], Any], element_spec: Any, models: Sequence[Any], traced: TracedStep) -> None:
    """Warns if the loss that a step takes the gradients of is no mean over the samples.

    Args:
        step: The step.
        element_spec: What its batches are like.
        models: Those that it trains.
        traced: Says that gradients are only looked at.
    """
    try:
        ratio, batch = math.inf, _samples(element_spec)
        for seed in range(_NUM_TRIES):
            if ratio > _LARGEST_OF_MEAN:
                found = [_found(step, samples, models, traced, seed) for samples in (batch, _twice(batch))]
                ratio = min(ratio, _ratio(*found))
    except Exception as error:  # a batch that was made up does not fit every model
        logger.debug("it could not be checked whether the loss is a mean over the samples: %s", error)
        return
    if ratio > _LARGEST_OF_MEAN:
        logger.warning(
            "the loss is a sum over the samples of a batch, or has one in it: with the same samples twice it grows "
            "%.1f times. So several workers train other weights than one process. Return the mean over the samples, "
            'also in `add_loss`: `tf.reduce_mean`. If you want the sum, use a loss of Keras with `reduction="sum"`, or '
            "`tf.nn.compute_average_loss(..., global_batch_size=...)`, which workers can join.",
            ratio,
        )


def _found(
    step: Callable[[Any], Any], batch: Any, models: Sequence[Any], traced: TracedStep, seed: int
) -> tuple[list[Any], list[Any]]:
    """The gradients of the first optimizer, and the losses that layers added."""
    with _undone(models, seed), traced.looking(num_samples(batch)):
        try:
            step(batch)
        except GradientsFound as found:
            added = [np.asarray(loss, np.float64) for model in models for loss in model.losses]
            return [_array(gradient) for gradient in found.gradients if gradient is not None], added
    raise ValueError("no optimizer was used")


def _ratio(once: tuple[list[Any], list[Any]], twice: tuple[list[Any], list[Any]]) -> float:
    """Return how much of the first is in the second, of all gradients together and of each loss."""
    (gradients, losses), (gradients_twice, losses_twice) = once, twice
    pairs = [([np.ravel(loss)], [np.ravel(other)]) for loss, other in zip(losses, losses_twice, strict=True)]
    pairs.append(([part.ravel() for part in gradients], [part.ravel() for part in gradients_twice]))
    found = [0.0]
    for one, other in pairs:
        first, second = np.concatenate(one), np.concatenate(other)
        square = first @ first
        if square > 0 and np.isfinite(square):
            found.append(float(first @ second / square))
    return max(found)


@contextmanager
def _undone(models: Sequence[Any], seed: int) -> Iterator[None]:
    """Inside, random numbers are those of `seed`, and what changes is put back."""
    variables = [variable for model in models for variable in (*model.variables, *variables_of(model.metrics))]
    values = [np.array(variable.numpy()) for variable in variables]
    drawn = rng.capture()
    rng.part_ways(0, seed, models)
    try:
        yield
    finally:
        rng.restore(drawn)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _array(gradient: Any) -> Any:
    import tensorflow as tf

    return np.asarray(tf.convert_to_tensor(gradient), np.float64)


def _samples(element_spec: Any) -> Any:
    """A batch of random numbers from 0 to 1, and of ones where they are whole."""
    import tensorflow as tf

    generator = np.random.default_rng(0)

    def of(part: Any) -> Any:
        shape = [_NUM_SAMPLES, *(1 if size is None else size for size in part.shape[1:])]
        return tf.cast(generator.uniform(size=shape) if part.dtype.is_floating else np.ones(shape), part.dtype)

    return tf.nest.map_structure(of, element_spec)


def _twice(batch: Any) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(lambda tensor: tf.concat([tensor, tensor], 0), batch)
