"""Reads the ready-made operators' options from a config and rejects invalid values.

Without these checks, an invalid value would fail far from its cause or not at all. For example, a learning rate given
as a string would fail inside an optimizer.
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
    """Return the value of an option, after checking that it is a finite, non-negative number.

    Args:
        config: The operator's config.
        key: The option's key.
        default: Value to return if the key is missing.
        positive: Whether to reject zero, too.

    Raises:
        ValueError: The value is not a finite number, is negative, or is zero with `positive=True`.

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


def count(config: Mapping[str, Any], key: str, default: int | None) -> int:
    """Return the value of an option, after checking that it is a positive integer.

    Raises:
        ValueError: The value is not a positive integer.

    Examples:
        >>> count({}, "noise_dim", default=64)
        64
    """
    value = config.get(key, default)
    if not _is_integer(value) or value < 1:
        raise ValueError(f"`config[{key!r}]={value!r}`: need an integer of at least 1. The default is {default}.")
    return int(value)


def batch_size(config: Mapping[str, Any]) -> int:
    """Return the batch size for the loaders that a worker creates.

    Users set the batch size per worker under the key `"batch_size"`, or the global batch size under the key
    `raysgd.utils.BATCH_SIZE`. In a worker's config, the library has already replaced the global batch size with the
    batch size per worker. With `split_batches=True`, however, the value under either key is the global batch size, and
    `register_data` splits the loader's batches among the workers.

    Raises:
        ValueError: The value is not a positive integer, or the config has both keys.

    Examples:
        >>> batch_size({"batch_size": 64}), batch_size({})
        (64, 32)
    """
    if BATCH_SIZE in config and "batch_size" in config:
        raise ValueError(f"The config has both {BATCH_SIZE!r} and 'batch_size': keep one.")
    return count(config, BATCH_SIZE if BATCH_SIZE in config else "batch_size", DEFAULT_BATCH_SIZE)


def seed(config: Mapping[str, Any]) -> int | None:
    """Return the seed for PyTorch's generators, or None to leave them unseeded.

    Raises:
        ValueError: The value is not an integer from 0 to 2**63 - 1.

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
    # In Python, True and False are integers, but as an option value they are always a mistake.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
