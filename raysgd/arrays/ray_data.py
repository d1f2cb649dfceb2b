"""Checks of datasets of Ray Data, for all front ends."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def is_of_ray(dataset: Any) -> bool:
    """Return whether it is a dataset of Ray Data."""
    return hasattr(dataset, "streaming_split")


def with_own_options(dataset: Any) -> Any:
    """The same dataset with separate execution options, which can be changed without changing the user's."""
    import ray

    return ray.get(ray.put(dataset))


def are_cpus_free() -> bool:
    """Return whether there is a CPU for the tasks of Ray Data; if not, the log says what follows."""
    import ray

    if ray.available_resources().get("CPU", 0) >= 1:
        return True
    logger.warning(
        "the workers hold all CPUs of the cluster, and Ray Data reads and transforms in tasks that need a CPU each: "
        "they may wait for ever. Use fewer workers, give each fewer CPUs, or add nodes"
    )
    return False
