"""Reads the options of the ready-made operators from a config and refuses what makes no sense.

A wrong value would rarely fail where it was written: a learning rate given as a string breaks inside an optimizer, a
negative one trains backwards without a word. Each function here takes the config, a key and a default.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from raysgd.utils import BATCH_SIZE

DEFAULT_BATCH_SIZE = 32
_LARGEST_SEED = 2**63 - 1


def number(config: Mapping[str, Any], key: str, default: float, *, positive: bool) -> float:
    """Return a finite number that is positive, or at least not negative.

    Args:
        config: The operator's config.
        key: Where to look.
        default: For a config without the key.
        positive: Whether zero is refused too.

    Raises:
        ValueError: The value is something else.

    Examples:
        >>> number({"lr": 0.1}, "lr", default=0.001, positive=True)
        0.1
    """
    value = config.get(key, default)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        kind = "positive number" if positive else "number of 0 or more"
        raise ValueError(f"`config[{key!r}]={value!r}`: need a {kind}; without the key it is {default:g}.")
    return float(value)


def count(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return an integer of at least 1.

    Raises:
        ValueError: The value is something else.

    Examples:
        >>> count({}, "noise_dim", default=64)
        64
    """
    value = config.get(key, default)
    if not _is_integer(value) or value < 1:
        raise ValueError(
            f"`config[{key!r}]={value!r}`: need an integer of at least 1; without the key it is {default}."
        )
    return int(value)


def batch_size(config: Mapping[str, Any]) -> int:
    """Return the batch size of the loader that a worker makes.

    It stands under `raysgd.utils.BATCH_SIZE`, given for all workers together and divided by the library, or under
    `"batch_size"`, given for one worker. With `split_batches=True` both are given for all, and divided with the loader.

    Raises:
        ValueError: The value is no count, or both keys are there.

    Examples:
        >>> batch_size({"batch_size": 64}), batch_size({})
        (64, 32)
    """
    if BATCH_SIZE in config and "batch_size" in config:
        raise ValueError(f"The config has both {BATCH_SIZE!r} and 'batch_size': keep one.")
    return count(config, BATCH_SIZE if BATCH_SIZE in config else "batch_size", DEFAULT_BATCH_SIZE)


def seed(config: Mapping[str, Any]) -> int | None:
    """Return the seed of PyTorch's generators, None to leave them alone.

    Raises:
        ValueError: The value is no integer that can be a seed.

    Examples:
        >>> seed({"seed": 3}), seed({})
        (3, None)
    """
    value = config.get("seed")
    if value is None:
        return None
    if not _is_integer(value) or not 0 <= value <= _LARGEST_SEED:
        raise ValueError(f"`config['seed']={value!r}`: need an integer of 0 or more, or None for a random one.")
    return int(value)


def _is_integer(value: Any) -> bool:
    # True and False are integers to Python, but as an option they are always a mistake.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
