"""A function for several workers with TensorFlow as a trial of Ray Tune, like `ray.tune.integration.tensorflow`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from raysgd.train.tensorflow import TensorflowConfig
from raysgd.tune._distributed import distributed_checkpoint_dir, make_distributed

__all__ = ["DistributedTrainableCreator", "distributed_checkpoint_dir", "get_num_workers"]


def DistributedTrainableCreator(
    func: Callable[..., Any],
    num_workers: int = 2,
    num_gpus_per_worker: float = 0,
    num_cpus_per_worker: float = 1,
    num_workers_per_host: int | None = None,
    timeout_s: float = 15 * 60,
) -> type[Any]:
    """A class for `ray.tune`: each trial runs `func(config, checkpoint_dir=None)` on its own workers.

    `TF_CONFIG` is set in each of them before `func` runs, so it may make a `MultiWorkerMirroredStrategy`. It reports
    with `raysgd.train.report`; what rank 0 reports counts. It saves with `distributed_checkpoint_dir`, and finds what
    was saved last in the folder `checkpoint_dir`, also after a worker was lost and the function restarted.

    Args:
        func: The function.
        num_workers: How many workers a trial has.
        num_gpus_per_worker: GPUs for each.
        num_cpus_per_worker: CPUs for each.
        num_workers_per_host: How many of them share a node, exactly; it divides `num_workers`. Default: Ray chooses
            the nodes.
        timeout_s: Accepted, as in the old library, where it bounded the wait for a reservation by host. How long a
            trial waits for its resources is Tune's affair.

    Raises:
        ValueError: `func` cannot be called like that, or a number is out of range.
        ImportError: Ray Tune or TensorFlow is not installed.
    """
    return make_distributed(
        func, TensorflowConfig(), num_workers, num_cpus_per_worker, num_gpus_per_worker, num_workers_per_host, timeout_s
    )


def get_num_workers() -> int:
    """Return how many workers there are, as `TF_CONFIG` says; 1 where it is not set."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return len(config.get("cluster", {}).get("worker", [None]))
