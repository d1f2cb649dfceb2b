"""Methods of models, optimizers and metrics of Keras that have ours in their place, each once."""

from __future__ import annotations

from typing import Any


def is_replaced(owner: Any, name: str) -> bool:
    """Return whether an instance has ours in the place of a method of its class."""
    return getattr(vars(owner).get(name), "_is_of_raysgd", False)


def mark_replaced(function: Any) -> Any:
    """Marks a function as ours, and returns it."""
    function._is_of_raysgd = True
    return function
