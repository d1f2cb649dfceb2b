"""Hyperparameter search: runs trainers as trials of Ray Tune, or in a `Population`, which does not use Ray Tune.

In a trial, the trainer starts its workers in the resources that Tune reserved for the trial. The trainer forwards rank
0's reports and the checkpoints to Tune, which chooses the configs.

No other package of raysgd imports this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from ray.tune import TuneConfig

    from raysgd.tune.population import Exploration, Population
    from raysgd.tune.tuner import ResultGrid, Tuner

__all__ = ["Exploration", "Population", "ResultGrid", "TuneConfig", "Tuner", "function"]

lazy_names(
    __name__,
    {
        "Exploration": "raysgd.tune.population",
        "Population": "raysgd.tune.population",
        "ResultGrid": "raysgd.tune.tuner",
        "TuneConfig": "ray.tune",
        "Tuner": "raysgd.tune.tuner",
    },
)

Function = TypeVar("Function", bound=Callable[..., object])


def function(func: Function) -> Function:
    """Return `func` unchanged.

    Early versions of Ray Tune called functions in a config to draw values. Programs written for these versions use this
    to mark a function that Tune must not call.
    """
    return func
