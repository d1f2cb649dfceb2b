"""Runs a TensorFlow function on several workers as a Ray Tune trial, like `ray.tune.integration.tensorflow`."""

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
    """Return a trainable class for `ray.tune`. Each trial runs `func(config, checkpoint_dir=None)` on separate workers.

    `TF_CONFIG` is set in each worker before `func` runs, so `func` may create a `MultiWorkerMirroredStrategy`. `func`
    reports metrics with `raysgd.train.report`; only the reports of rank 0 count. It saves checkpoints with
    `distributed_checkpoint_dir`. If there is a checkpoint, the argument `checkpoint_dir` is a folder with the last one,
    even when `func` restarts after a worker was lost.

    Args:
        func: The training function, which each worker runs.
        num_workers: Number of workers per trial.
        num_gpus_per_worker: GPUs per worker.
        num_cpus_per_worker: CPUs per worker.
        num_workers_per_host: Exact number of workers on each node; it must divide `num_workers`. Default: Ray chooses
            the nodes.
        timeout_s: Accepted but ignored. In `ray.tune.integration`, it limited the wait for resources, which Tune now
            controls.

    Raises:
        ValueError: `func` has other parameters, or a number is out of range.
        ImportError: Ray Tune or TensorFlow is not installed.
    """
    return make_distributed(
        func, TensorflowConfig(), num_workers, num_cpus_per_worker, num_gpus_per_worker, num_workers_per_host, timeout_s
    )


def get_num_workers() -> int:
    """Return the number of workers in `TF_CONFIG`, or 1 if it is not set."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return len(config.get("cluster", {}).get("worker", [None]))
