"""Random numbers: alike on all ranks until the replicas are built, and each rank's own from then on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from raysgd.tf.objects import registration


def seed_alike(seed: int) -> None:
    """Seeds all ranks alike, so that models begin equal and shuffled datasets come in one order."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(seed)  # of TensorFlow, NumPy and `random`, and what this Keras draws seeds from


def part_ways(seed: int, rank: int, models: Sequence[Any]) -> None:
    """Makes what is drawn while training, for dropout for example, each rank's own."""
    import tensorflow as tf

    tf.random.set_seed(seed + rank)
    for variable in seeds_of(models):
        variable.assign(np.array(variable.numpy()) + np.uint32(rank))


def capture() -> Any:
    """The states of the generators of NumPy and `random`."""
    return np.random.get_state(), random.getstate()


def restore(states: Any) -> None:
    """Goes on where they were."""
    of_numpy, of_python = states
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def seeds_of(models: Sequence[Any]) -> list[Any]:
    """Return what layers of Keras 3 draw random numbers from: variables of models that are no weights."""
    known = {id(variable) for model in models for variable in registration.weights_of(model)}
    return [
        variable
        for model in models
        if model.built and not registration.is_legacy(model)
        for variable in model.non_trainable_variables
        if id(variable) not in known
    ]
