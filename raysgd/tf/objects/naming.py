"""Default names of Keras layers and metrics, which Keras numbers by counting the objects of the process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from raysgd.core.private_names import find_name

_first_counts: Mapping[str, int] | None = None  # before the first `setup` of this process


def begin_names() -> None:
    """Let the next `setup` get the names of a new process, even if this process has run others before.

    Results are named by metrics, and `auc` would be `auc_1` on workers that have run `setup` twice.
    """
    global _first_counts
    import tensorflow as tf

    is_first = _first_counts is None
    reset_legacy = getattr(tf.keras.backend, "reset_uids", None)  # of tf_keras
    if reset_legacy is not None:
        _first_counts = _first_counts or {}
        if not is_first:
            reset_legacy()
        return
    counts = _counts_of_keras()
    if _first_counts is None:
        _first_counts = dict(counts)
    counts.clear()
    counts.update(_first_counts)


def _counts_of_keras() -> dict[str, int]:
    """Return Keras 3's name counts of this thread, or a new dict if a newer version hides them."""
    attribute: Any = find_name("keras.src.backend.common.global_state:get_global_attribute")
    fresh: dict[str, int] = defaultdict(int)
    if attribute is None:
        return fresh
    counts: dict[str, int] = attribute("object_name_uids", default=fresh, set_to_default=True)
    return counts
