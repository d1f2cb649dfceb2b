"""Hyperparameter search with Ray Tune (`Tuner`) or without it (`Population`).

`Tuner` runs a trainer with many configs that Ray Tune chooses. Each run is a trial. The trainer starts its workers on
the resources that Tune reserved for the trial, and passes rank 0's reports and checkpoints to Tune.

`Population` trains several trainers at the same time. Between intervals of training, the worst trainers copy the best.

No other package of raysgd needs this package. Only `raysgd.torch.func_trainable` re-exports some of its functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from raysgd.core.imports import lazy_names

lazy_names(__name__)

Function = TypeVar("Function", bound=Callable[..., object])


def function(func: Function) -> Function:
    """Return `func` unchanged.

    Early versions of Ray Tune called every function in a config to draw a value. Programs written for these versions
    decorate a function with `function` so that Tune does not call it.
    """
    return func
