"""Reads the options of the ready-made operators from a config, and refuses values that make no sense.

Otherwise a wrong value would fail far from where you wrote it, or not at all: a learning rate that is a string breaks
inside an optimizer.
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
        key: Key of the option.
        default: Value if the config does not have the key.
        positive: True to refuse zero too.

    Raises:
        ValueError: The value is not such a number.

    Examples:
        >>> number({"lr": 0.1}, "lr", default=0.001, positive=True)
        0.1
    """
    value = config.get(key, default)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        kind = "positive number" if positive else "number of 0 or more"
        raise ValueError(f"`config[{key!r}]={value!r}`: need a {kind}. The default is {default:g}.")
    return float(value)


def count(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return an integer of at least 1.

    Raises:
        ValueError: The value is not such an integer.

    Examples:
        >>> count({}, "noise_dim", default=64)
        64
    """
    value = config.get(key, default)
    if not _is_integer(value) or value < 1:
        raise ValueError(f"`config[{key!r}]={value!r}`: need an integer of at least 1. The default is {default}.")
    return int(value)


def batch_size(config: Mapping[str, Any]) -> int:
    """Return the batch size for the loaders that a worker makes.

    The key `raysgd.utils.BATCH_SIZE` counts all workers together; the library has already divided it. The key
    `"batch_size"` counts one worker. With `split_batches=True`, both count all workers, and the loader is divided.

    Raises:
        ValueError: The value is not an integer of at least 1, or the config has both keys.

    Examples:
        >>> batch_size({"batch_size": 64}), batch_size({})
        (64, 32)
    """
    if BATCH_SIZE in config and "batch_size" in config:
        raise ValueError(f"The config has both {BATCH_SIZE!r} and 'batch_size': keep one.")
    return count(config, BATCH_SIZE if BATCH_SIZE in config else "batch_size", DEFAULT_BATCH_SIZE)


def seed(config: Mapping[str, Any]) -> int | None:
    """Return the seed for PyTorch's generators; None to not seed them.

    Raises:
        ValueError: The value is not an integer that can be a seed.

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
    # To Python, True and False are integers, but as an option they are always a mistake.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
