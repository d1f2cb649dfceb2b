"""Ray Tune: trainers as trials, and populations of trainers that stay alive.

A trial starts its workers in the resources that Tune reserved for it, forwards rank 0's reports, and passes its
checkpoints to Tune.

Tune does the search. No other package of raysgd imports this package.
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
    """Return the function unchanged.

    Very old programs use this to mark functions that are values in a config rather than search spaces.
    """
    return func
