"""Small helpers for paths and functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def construct_path(path: str | Path, parent: str | Path) -> Path:
    """Return `path` as an absolute path. A relative path is under `parent`, and `~` is the home folder.

    >>> construct_path("a", "/b").as_posix()
    '/b/a'
    """
    path = Path(path).expanduser()
    return (path if path.is_absolute() else Path(parent).expanduser() / path).resolve()


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function.

    Keyword-only parameters that have a default, or a value from `partial`, are left out.
    """
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or parameter.default is inspect.Parameter.empty
    ]


def without_arguments(
    function: Callable[..., Any], config: Any, name: str = "train_func", config_name: str = "config"
) -> Callable[[], Any]:
    """Return a callable without arguments that calls `function`, with `config` if `function` takes an argument.

    Args:
        function: The user's function, which takes either no argument or `config`.
        config: The function's argument; None for an empty dict.
        name: Name of the option that holds the function, for error messages.
        config_name: Name of the option that holds the argument, for error messages.

    Raises:
        TypeError: `function` is not callable, or takes its parameter only by name.
        ValueError: `function` takes more than one parameter.
    """
    if not callable(function):
        raise TypeError(f"`{name}={function!r}`: need a function that takes no argument, or one, `{config_name}`.")
    parameters = parameters_of(function)
    num_parameters = len(parameters)
    if num_parameters > 1:
        raise ValueError(
            f"`{name}` takes {num_parameters} parameters: allowed are one, `{config_name}`, or none. Put "
            f"everything into `{config_name}`, or bind it beforehand with `functools.partial`."
        )
    if num_parameters == 0:
        return function
    if parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise TypeError(
            f"`{name}` takes `{parameters[0]}` only by name, but it is called with `{config_name}` by position, as "
            f"`{name}({config_name})`."
        )
    return partial(function, config if config is not None else {})
