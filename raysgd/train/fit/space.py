"""Arguments of a trainer that trials of Ray Tune change: checked before there are trials, and merged in each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._arguments import did_you_mean
from raysgd.air.config import ScalingConfig, is_open
from raysgd.driver import tune_trial
from raysgd.train.fit import arguments
from raysgd.train.fit.job import FitTrainer


def check_space(trainer: FitTrainer, space: Mapping[str, Any]) -> None:
    """Refuses what no trial of a trainer could begin with.

    Raises:
        ValueError: A name that is no argument of the trainer, or a `scaling_config` that cannot be.
    """
    _refuse_run_config(space)
    known = _argument_names(type(trainer))
    for name in space:
        if known is not None and name not in known:
            of_trainer = f"is not an argument of `{type(trainer).__name__}`"
            raise ValueError(f"`param_space` has `{name}`, which {of_trainer}.{did_you_mean(name, known)}")
    for scaling in _choices(space.get("scaling_config")):
        arguments.checked_scaling(_merged(trainer._arguments.get("scaling_config"), scaling))


def merged_arguments(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer with those of a trial merged over them, down to the values of dicts."""
    _refuse_run_config(config)
    return {**given, **{name: _merged(given.get(name), value) for name, value in config.items()}}


def _refuse_run_config(config: Mapping[str, Any]) -> None:
    if "run_config" in config:
        raise ValueError("`param_space` has a `run_config`: pass it to the `Tuner` itself, for all trials alike.")


def _argument_names(trainer_cls: type[Any]) -> set[str] | None:
    """Return what a trainer takes by name; None where a class of the user's takes any name."""
    known: set[str] = set()
    for owner in (each for each in trainer_cls.__mro__[:-1] if "__init__" in vars(each)):
        parameters = [*inspect.signature(vars(owner)["__init__"]).parameters.values()][1:]
        known |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
        if not owner.__module__.startswith("raysgd."):  # it may keep some of them for itself
            return None
    return known


def _choices(value: Any) -> Sequence[Any]:
    """The values that are known of one that Ray Tune may still have to choose."""
    if value is None or not is_open(value):
        return [] if value is None else [value]
    return value["grid_search"] if isinstance(value, Mapping) else []


def _merged(before: Any, value: Any) -> Any:
    if isinstance(before, ScalingConfig) and isinstance(value, Mapping):
        return arguments.changed_scaling(before, value)
    if isinstance(before, ScalingConfig) and isinstance(value, ScalingConfig):
        return arguments.changed_scaling(before, arguments.own_values(value))
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return tune_trial.merged(before, value)
    return value
