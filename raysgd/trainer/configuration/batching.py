"""Splits a global batch size, the number of samples in one step over all workers, into the batch sizes of workers.

The user sets one batch size for all workers, and each worker gets an equal part. All results are computed from the size
that the user requested, so rounding does not accumulate when a group shrinks from 4 to 3 workers and grows back to 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.core.arguments import check_count, with_entries
from raysgd.core.config_keys import BATCH_SIZE

_PLAIN = "Pass a plain `int`."


def split_batch_size(requested: int, num_workers: int) -> int:
    """Return the batch size of one worker: the global batch size divided by the number of workers, rounded down.

    Args:
        requested: The global batch size, of any integer type. Search algorithms, for example, pass NumPy integers.
        num_workers: Number of workers, at least 1.

    Raises:
        ValueError: A value is not an integer or is below 1, or there are more workers than samples in a step.

    Examples:
        >>> split_batch_size(21, num_workers=2)
        10
    """
    num_samples = check_global_size(requested)
    size = check_count("num_workers", num_workers, _PLAIN)
    per_worker = num_samples // size
    if per_worker == 0:
        raise ValueError(
            f"`config[{BATCH_SIZE!r}]={num_samples}` with `num_workers={size}`: this batch size is the global one, for "
            f"all workers, so it must be at least `num_workers`. Raise it to {size} or more, or use fewer workers."
        )
    return per_worker


def global_batch_in_words(num_workers: int, batch_size: int) -> str:
    """Describe a global batch whose size depends on the number of workers.

    Args:
        num_workers: Number of workers.
        batch_size: Number of samples in the batch of one worker.

    Examples:
        >>> global_batch_in_words(2, 32)
        '2 workers x 32 samples: a global batch of 64'
    """
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"{workers} x {batch_size} samples: a global batch of {num_workers * batch_size}"


def config_for_worker(config: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
    """Return a copy of the trainer's config in which the global batch size is replaced by the batch size of one worker.

    Only the key `raysgd.utils.BATCH_SIZE` is changed, if present. A plain `"batch_size"` is already the batch size of
    one worker. The copy is shallow: its values are the user's objects.

    Raises:
        ValueError: The batch size cannot be split over this many workers; see `split_batch_size`.

    Examples:
        >>> config_for_worker({"*batch_size": 64, "lr": 0.1}, num_workers=4)
        {'*batch_size': 16, 'lr': 0.1}
    """
    if BATCH_SIZE not in config:
        return with_entries(config)
    return with_entries(config, {BATCH_SIZE: split_batch_size(config[BATCH_SIZE], num_workers)})


def check_global_size(requested: Any) -> int:
    """Check a global batch size, and return it as a Python integer.

    Raises:
        ValueError: The batch size is not an integer or is below 1.
    """
    return check_count(f"config[{BATCH_SIZE!r}]", requested, _PLAIN)
