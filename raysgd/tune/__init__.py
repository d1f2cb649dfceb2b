"""Ray Tune: trainers as trials, and populations of trainers that stay alive.

What it guarantees: a trial starts its workers in what Tune reserved for it, reports what rank 0 reports, and
gives its checkpoints to Tune.
What it leaves to others: the search is Tune's. No other package of raysgd imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from raysgd._imports import lazy_names

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
    """Return the function: the oldest programs marked those that are values in a config and no search space."""
    return func
