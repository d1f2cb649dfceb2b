"""Small helpers for paths and functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def construct_path(path: str | Path, parent: str | Path) -> Path:
    """Where `path` is: absolute ones and those in the home folder stay, others are under `parent`.

    >>> construct_path("a", "/b").as_posix()
    '/b/a'
    """
    path = Path(path).expanduser()
    return (path if path.is_absolute() else Path(parent).expanduser() / path).resolve()


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a function takes, without what is set by name already: by its default, or by a `functools.partial`."""
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or parameter.default is inspect.Parameter.empty
    ]


def without_arguments(train_func: Callable[..., Any], config: Any) -> Callable[[], Any]:
    """The function with its argument bound: `config` if it takes one parameter, nothing if it takes none.

    Raises:
        TypeError: It cannot be called, or takes its parameter by name only.
        ValueError: It takes more than one parameter.
    """
    if not callable(train_func):
        raise TypeError(
            f"`train_func={train_func!r}`: need a function that takes no argument, or one, the `config` dict."
        )
    parameters = parameters_of(train_func)
    num_parameters = len(parameters)
    if num_parameters > 1:
        raise ValueError(
            f"`train_func` takes {num_parameters} parameters: allowed is one, the `config` dict, or no parameter. Put "
            "everything into `config`, or bind it beforehand with `functools.partial`."
        )
    if num_parameters == 0:
        return train_func
    if parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise TypeError(
            f"`train_func` takes `{parameters[0]}`, by name only: it is called with the `config` by position, as "
            "`train_func(config)`."
        )
    return partial(train_func, config if config is not None else {})
