"""The optimizer weights in files of the old library, arranged as the variables of an optimizer of today.

The old library wrote what `get_weights()` of an optimizer from before Keras 2.11 returned: the number of steps, then
each kind of slot for all variables of the model, one kind behind the other. The file does not say which optimizer that
was. Today's optimizers have further variables, and other orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raysgd.tf.objects import registration

# For each optimizer the attributes that hold its slots, in the order in which the old one of that name kept them. Each
# step of both computes the same from them.
_SLOTS = {
    "SGD": ("momentums",),
    "Adam": ("_momentums", "_velocities", "_velocity_hats"),
    "RMSprop": ("_velocities", "_momentums", "_average_gradients"),
    "Adagrad": ("_accumulators",),
    "Adadelta": ("_accumulated_grads", "_accumulated_delta_vars"),
    "Adamax": ("_m", "_u"),
}


def arranged(optimizer: Any, weights: Sequence[Any]) -> list[Any]:
    """Return the value of each variable of `optimizer`: from `weights` where they have it, else what it is now.

    Raises:
        ValueError: It is not known where they belong; the message says why, to follow "because".
    """
    if not weights:
        raise ValueError("the file has none")
    name, inner = type(optimizer).__name__, getattr(optimizer, "inner_optimizer", optimizer)
    if inner is not optimizer:
        name = f"{type(inner).__name__} in a {name}"
    homes = _homes(inner)
    if homes is None:
        raise ValueError(f"how the old library kept those of `{name}` is not known; known are {', '.join(_SLOTS)}")
    if [np.shape(weight) for weight in weights] != [tuple(home.shape) for home in homes]:
        raise ValueError(f"the {len(weights)} arrays in the file are not the number of steps and the slots of `{name}`")
    values = {id(home): np.asarray(weight) for home, weight in zip(homes, weights, strict=True)}
    variables = registration.variables_of_optimizer(optimizer)
    return [values.get(id(variable), np.array(variable.numpy())) for variable in variables]


def _homes(optimizer: Any) -> list[Any] | None:
    """Return the variables that the weights of a file belong to, in their order; None where that is not known."""
    if hasattr(optimizer, "_create_all_weights"):  # of the same kind as in the old library
        return registration.variables_of_optimizer(optimizer)
    kind = type(optimizer)
    if kind.__name__ not in _SLOTS or kind.__module__.partition(".")[0] not in ("keras", "tf_keras"):
        return None
    if kind.__name__ == "SGD" and not optimizer.momentum:  # tf_keras makes slots that it does not use
        return [optimizer.iterations]
    slots = [getattr(optimizer, attribute, None) or [] for attribute in _SLOTS[kind.__name__]]
    return [optimizer.iterations, *(variable for one in slots for variable in one)]
