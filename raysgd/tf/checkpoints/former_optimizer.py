"""Converts optimizer weights from files written by `ray.util.sgd` to the variables of current optimizers.

These files contain the result of `get_weights()` of a pre-Keras-2.11 optimizer: the number of steps, then the slots
(per-variable state, such as momentums) of all model variables, grouped by slot type. They do not name the optimizer.
Current optimizers have additional variables and a different order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raysgd.tf.objects import registration

# For each current optimizer, the attributes that hold its slots, in the order in which the old optimizer of the same
# name stored its slots. Both optimizers compute the same steps from these slots.
_SLOTS = {
    "SGD": ("momentums",),
    "Adam": ("_momentums", "_velocities", "_velocity_hats"),
    "RMSprop": ("_velocities", "_momentums", "_average_gradients"),
    "Adagrad": ("_accumulators",),
    "Adadelta": ("_accumulated_grads", "_accumulated_delta_vars"),
    "Adamax": ("_m", "_u"),
}


def arranged(optimizer: Any, weights: Sequence[Any]) -> list[Any] | None:
    """Return a value for each variable of a current optimizer, using the weights from a file of `ray.util.sgd`.

    Variables that the file does not contain keep their current values. Return None if the shapes of the weights do not
    match the optimizer's variables.

    Args:
        optimizer: The current optimizer.
        weights: The weights from the file.
    """
    variables, inner = registration.variables_of_optimizer(optimizer), getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(inner, "_create_all_weights"):  # a pre-Keras-2.11 optimizer, which uses the same order as the file
        homes = registration.variables_of_optimizer(inner)
    else:
        slots = [getattr(inner, attribute, None) or () for attribute in _SLOTS.get(type(inner).__name__, ())]
        homes = [inner.iterations, *(variable for one in slots for variable in one)]
    homes = homes if len(weights) > 1 else homes[:1]  # SGD without momentum: ignore the slots that tf_keras creates
    if [np.shape(weight) for weight in weights] != [tuple(home.shape) for home in homes]:
        return None
    values = {id(home): np.asarray(weight) for home, weight in zip(homes, weights, strict=True)}
    return [values.get(id(variable), np.array(variable.numpy())) for variable in variables]
