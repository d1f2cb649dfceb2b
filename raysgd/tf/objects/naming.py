"""Resets the counters with which Keras numbers the default names of layers and metrics, such as `dense_1`.

The counters are global to the process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from raysgd.core.private_names import find_name

_first_counts: Mapping[str, int] | None = None  # Keras's counters before the first `setup` in this process


def begin_names() -> None:
    """Reset Keras's name counters, so that the next `setup` gets the same names as in a new process.

    The entries of results are named after the metrics. Without the reset, a metric `auc` would be called `auc_1` on a
    worker that has already run a `setup`, and its name would differ between workers.
    """
    global _first_counts
    import tensorflow as tf

    reset_legacy = getattr(tf.keras.backend, "reset_uids", None)  # only tf_keras has this function
    counts = _counts_of_keras() if reset_legacy is None else {}
    if _first_counts is None:
        _first_counts = dict(counts)
    elif reset_legacy is not None:
        reset_legacy()
    counts.clear()
    counts.update(_first_counts)


def _counts_of_keras() -> dict[str, int]:
    """Return the dict in which Keras 3 counts names in this thread, or a new dict if this Keras version has none."""
    attribute: Any = find_name("keras.src.backend.common.global_state:get_global_attribute")
    fresh: dict[str, int] = defaultdict(int)
    if attribute is None:
        return fresh
    return attribute("object_name_uids", default=fresh, set_to_default=True)
