"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from collections.abc import Callable
from typing import TypeVar

from ray.tune import TuneConfig as TuneConfig

from raysgd.tune.population import Exploration as Exploration
from raysgd.tune.population import Population as Population
from raysgd.tune.tuner import ResultGrid as ResultGrid
from raysgd.tune.tuner import Tuner as Tuner

_Function = TypeVar("_Function", bound=Callable[..., object])

def function(func: _Function) -> _Function: ...
