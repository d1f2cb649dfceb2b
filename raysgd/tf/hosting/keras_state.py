"""Reads and loads the state of a Keras replica. Before loading a state, checks that it matches the replica.

The module also seeds the replica: with equal seeds on all ranks while models and datasets are created, and with
different seeds afterwards.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raysgd.tf.fit import FitStream, check_state
from raysgd.tf.hosting.tf_feed import TFFeed
from raysgd.tf.objects import registration
from raysgd.tf.training_operator import TrainingOperator
from raysgd.trainer.worker.replica_state import RESUME, ReplicaState, StateCopy


class KerasState(ReplicaState):
    """Reads and loads the state of a replica: models, optimizers, and the position in the data or in Keras's `fit`.

    Args:
        operator: Operator with the registered objects and the user's own state.
        feed: Object that holds the position in the data.
        fit: Holds the position of Keras's `fit`. None if the operator draws batches itself.
    """

    def __init__(self, operator: TrainingOperator, feed: TFFeed, fit: FitStream | None) -> None:
        super().__init__(operator, feed)
        self._fit = fit

    def read(self) -> dict[str, Any]:
        state = super().read()
        return {**state, "operator": copy.deepcopy(state["operator"])}

    def _parts(self) -> dict[str, Any]:
        models = self._operator._models
        undo = self._operator._raysgd.context.synchronizer.undo
        return {
            "models": [[*map(_array, undo.values_of(registration.weights_of(model)))] for model in models],
            "optimizers": [
                [_array(variable) for variable in registration.variables_of_optimizer(optimizer)]
                for optimizer in self._operator._optimizers
            ],
        }

    def _more_progress(self) -> dict[str, Any]:
        return {"fit": None if self._fit is None else self._fit.state()}

    def _apply_more_progress(self, resume: Mapping[str, Any]) -> None:
        if self._fit is not None and resume.get("fit"):
            self._fit.resume(resume["fit"])

    def copy_for_driver(self, rank: int) -> StateCopy | None:
        if rank:
            return None
        state = self.read()
        arrays = [array for part in ("models", "optimizers") for arrays in state[part] for array in arrays]
        return StateCopy(state, sum(array.nbytes for array in arrays))

    def own(self) -> list[Any]:
        return [_array(variable) for variable in self._seeds()]

    def check_own(self, own: Sequence[Any]) -> None:
        seeds = self._seeds()
        if len(own) == len(seeds):  # otherwise, the state is of a model with other layers: ignore its seeds
            _check_fit(seeds, own, "the random generators")

    def restore_own(self, own: Sequence[Any]) -> None:
        seeds = self._seeds()
        if len(own) == len(seeds):
            for variable, value in zip(seeds, own, strict=True):
                variable.assign(value)

    def _seeds(self) -> list[Any]:
        return seeds_of(self._operator._models)

    def _check_parts(self, state: Mapping[str, Any]) -> None:
        for variables, values, what in self._targets(state):
            _check_fit(variables, values, what)
        of_fit = (state.get(RESUME) or {}).get("fit")
        if self._fit is not None and of_fit:
            check_state(of_fit)

    def _apply_parts(self, state: Mapping[str, Any]) -> None:
        for variables, values, _ in self._targets(state):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        for model in self._operator._models:
            registration.take_weights_in(model)

    def _targets(self, state: Mapping[str, Any]) -> list[tuple[list[Any], Sequence[Any], str]]:
        operator = self._operator
        targets = [
            (registration.weights_of(model), values, f"model {index}")
            for index, (model, values) in enumerate(zip(operator._models, state["models"], strict=True))
        ]
        targets += [
            (registration.variables_to_load(optimizer, values), values, f"optimizer {index}")
            for index, (optimizer, values) in enumerate(zip(operator._optimizers, state["optimizers"], strict=True))
        ]
        return targets


def _array(variable: Any) -> Any:
    """Copy a variable's value to an array."""
    return np.array(variable.numpy())


def _check_fit(variables: Sequence[Any], values: Sequence[Any], what: str) -> None:
    if not isinstance(values, Sequence) or not all(isinstance(value, np.ndarray | np.generic) for value in values):
        raise ValueError(f"The state of {what} is not a list of arrays. Nothing was loaded.")
    if len(variables) != len(values):
        raise ValueError(
            f"The state of {what} has {len(values)} arrays, but this trainer has {len(variables)} variables for it, so "
            "nothing was loaded. Load the state with the operator that saved it, and give models their input shape."
        )
    shapes = [
        f"{index}: {np.shape(value)} instead of {tuple(variable.shape)}"
        for index, (variable, value) in enumerate(zip(variables, values, strict=True))
        if tuple(variable.shape) != np.shape(value)
    ]
    strangers = [np.asarray(value).dtype.name for value in values if np.asarray(value).dtype.kind in "SUMmO"]
    if strangers:
        raise ValueError(
            f"The state of {what} has arrays of {strangers[0]}, which are not numbers. Nothing was loaded."
        )
    if shapes:
        raise ValueError(
            f"The state of {what} does not match the variables of this trainer, so nothing was loaded. Shapes: "
            f"{shapes}."
        )


def seed_alike(seed: int) -> None:
    """Seed all random generators equally on all ranks before `setup`, which creates models and shuffled datasets."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(seed)  # seeds TensorFlow, NumPy and `random`, from which layers draw their seeds


def part_ways(seed: int, rank: int, models: Sequence[Any]) -> None:
    """Seed TensorFlow and Keras 3 layers differently on each rank, so that ranks draw different dropout masks.

    Call this after `setup`. It does not change the global random generators of NumPy and Python.
    """
    import tensorflow as tf

    tf.random.set_seed(seed + rank)
    for variable in seeds_of(models):
        variable.assign(np.array(variable.numpy()) + np.uint32(rank))


def random_states() -> Any:
    """Return the states of NumPy's and Python's global random generators."""
    return np.random.get_state(), random.getstate()


def restore_random_states(states: Any) -> None:
    """Restore the states of NumPy's and Python's global random generators."""
    of_numpy, of_python = states
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def seeds_of(models: Sequence[Any]) -> list[Any]:
    """Return the variables in which Keras 3 layers store random seeds: all variables that are not weights."""
    known = {id(variable) for model in models for variable in registration.weights_of(model)}
    return [
        variable
        for model in models
        if model.built and not registration.is_legacy(model)
        for variable in model.non_trainable_variables
        if id(variable) not in known
    ]
