"""Checks of what a saved state says about progress, made before anything is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd._arguments import is_integer

_MAX_COUNT = 2**62


def require(holds: bool, finding: str) -> None:
    """Refuse a state.

    Raises:
        ValueError: `holds` is not so. The message has `finding`.
    """
    if not holds:
        raise ValueError(f"The state does not fit, nothing was loaded: {finding}.")


def check_progress(epoch: Any, resume: Any) -> None:
    """Refuse an invalid epoch, step counter or position in the data.

    Raises:
        ValueError: The message says which.
    """
    check_count("epoch", epoch)
    if resume is None:
        return
    require(isinstance(resume, Mapping), f"`resume` is a `{type(resume).__name__}`, not a dict")
    check_count("global_step", resume.get("global_step", 0))
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
    """Refuse what is no whole number from 0 on.

    Raises:
        ValueError: One of them is invalid.
    """
    found = value if is_integer(value) else f"a `{type(value).__name__}`"
    require(is_integer(value) and 0 <= value < _MAX_COUNT, f"`{name}` is {found}, not a count")


def check_parts(state: Mapping[str, Any], counts: Mapping[str, int], *others: str) -> None:
    """Refuse a state that lacks a part. The driver knows no more than how many there are of each.

    Raises:
        KeyError: A part is missing.
        ValueError: Another number of them was saved.
    """
    missing = [key for key in ("epoch", *others, *counts) if key not in state]
    if missing:
        raise KeyError(f"The state has no {', '.join(map(repr, missing))}; it has {sorted(map(str, state))}.")
    for key, count in counts.items():
        if not isinstance(state[key], list | tuple):
            raise ValueError(
                f"The state's {key!r} is a `{type(state[key]).__name__}` instead of a list. Nothing was loaded."
            )
        if len(state[key]) != count:
            raise ValueError(
                f"The state holds {len(state[key])} {key}, but the operator registered {count}. Nothing was loaded; "
                "load it with what saved it."
            )
