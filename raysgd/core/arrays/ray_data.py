"""Helpers for Ray Data datasets that all front ends, such as `TorchTrainer`, use."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def is_of_ray(dataset: Any) -> bool:
    """Return True if the object is a Ray Data dataset."""
    return hasattr(dataset, "streaming_split")


def with_own_options(dataset: Any) -> Any:
    """Return a copy of a Ray Data dataset. Changes to the copy's execution options do not affect the user's dataset."""
    import ray

    return ray.get(ray.put(dataset))


def are_cpus_free() -> bool:
    """Return True if the cluster has a free CPU for Ray Data's tasks. Otherwise, log a warning and return False."""
    import ray

    if ray.available_resources().get("CPU", 0) >= 1:
        return True
    logger.warning(
        "the workers hold all CPUs of the cluster, and Ray Data reads and transforms in tasks that need a CPU each, so "
        "these tasks may wait forever. Use fewer workers, give each fewer CPUs, or add nodes"
    )
    return False
