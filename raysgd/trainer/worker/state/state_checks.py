"""Checks that a saved training state can be loaded. The checks run before any state is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.core.arguments import is_integer, is_saved_count


def require(holds: bool, finding: str) -> None:
    """Raise an error if a state dict does not meet a condition.

    Args:
        holds: Whether the condition is met.
        finding: What is wrong if it is not met, for the error message.

    Raises:
        ValueError: `holds` is False.
    """
    if not holds:
        raise ValueError(f"The state does not match, so nothing was loaded: {finding}.")


def check_progress(epoch: Any, resume: Any) -> None:
    """Check the progress in a state dict: the epoch, the step counter and the position in the data.

    Args:
        epoch: The epoch number in the state dict.
        resume: The step counter and the position, or None if the state dict has none.

    Raises:
        ValueError: A value is invalid. The message names the value.
    """
    check_count("epoch", epoch)
    if resume is None:
        return
    require(isinstance(resume, Mapping), f"`resume` is a `{type(resume).__name__}`, not a dict")
    check_count("global_step", resume.get("global_step", 0))
    check_count("largest_batch", resume.get("largest_batch", 1))
    if resume.get("position") is not None:
        _check_position(resume["position"])


def _check_position(position: Any) -> None:
    require(isinstance(position, Mapping), f"the position in the data is a `{type(position).__name__}`, not a dict")
    check_count("pass_index", position.get("pass_index"))
    if position.get("is_unknown"):
        return
    check_count("consumed", position.get("consumed"))
    require(is_integer(position.get("seed")) and abs(position["seed"]) < 2**64, "the seed of the data is not a number")
    require(is_integer(position.get("order", 0)), "the order of the data is not a number")
    require(isinstance(position.get("is_mid_pass"), bool), "the position does not say if it is inside an epoch")
    if "num_samples" in position:
        check_count("num_samples", position["num_samples"])
        require(position["consumed"] <= position["num_samples"], "the position is after the end of the data")


def check_count(name: str, value: Any) -> None:
    """Check that a value in a state dict is a non-negative integer.

    Args:
        name: Name of the value, for the error message.
        value: The value.

    Raises:
        ValueError: The value is not a non-negative integer, or is too large.
    """
    found = value if is_integer(value) else f"a `{type(value).__name__}`"
    require(is_saved_count(value), f"`{name}` is {found}, not a count")


def check_parts(state: Mapping[str, Any], counts: Mapping[str, int], *others: str) -> None:
    """Check that a state dict has the state of as many models and optimizers as the operator has registered.

    The driver, which has no operator, also calls this function.

    Args:
        state: The state dict to load.
        counts: Number of registered objects by key of the state dict, such as "models".
        *others: Further keys that the state dict must have.

    Raises:
        ValueError: A key is missing, or its value is not a list or has the wrong number of objects.
    """
    missing = [key for key in ("epoch", *others, *counts) if key not in state]
    if missing:
        raise ValueError(
            f"The state has no {', '.join(map(repr, missing))}, so nothing was loaded. It has "
            f"{sorted(map(str, state))}. Load it into an operator like the one that saved it."
        )
    for key, count in counts.items():
        if not isinstance(state[key], list | tuple):
            raise ValueError(
                f"The state's {key!r} is a `{type(state[key]).__name__}` instead of a list. Nothing was loaded."
            )
        if len(state[key]) != count:
            raise ValueError(
                f"The state holds {len(state[key])} {key}, but the operator registered {count}. Nothing was loaded. "
                "Load the state into an operator like the one that saved it."
            )
