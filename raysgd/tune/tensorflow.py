"""Runs a TensorFlow training function on several workers as a Ray Tune trial.

The functions are those of the former `ray.tune.integration.tensorflow`.
"""

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

    The environment variable `TF_CONFIG` is set in each worker before `func` runs, so `func` may create a
    `MultiWorkerMirroredStrategy`. `func` reports metrics with `raysgd.train.report`, and saves checkpoints with
    `distributed_checkpoint_dir`. Only rank 0's reports reach Tune. When `func` starts from a checkpoint, for example
    after a worker was lost, `checkpoint_dir` is a folder with the checkpoint's files.

    Args:
        func: The training function, which each worker runs.
        num_workers: Number of workers per trial.
        num_gpus_per_worker: GPUs per worker.
        num_cpus_per_worker: CPUs per worker.
        num_workers_per_host: Exact number of workers on each node; it must divide `num_workers`. Default: Ray chooses
            the nodes.
        timeout_s: Accepted but not used. In `ray.tune.integration`, this argument limited how long a trial waited for
            resources. Tune now controls how long trials wait.

    Raises:
        ValueError: `func` cannot be called with a config and `checkpoint_dir`, or a number is out of range.
        ImportError: Ray Tune or TensorFlow is not installed.
    """
    return make_distributed(
        func, TensorflowConfig(), num_workers, num_cpus_per_worker, num_gpus_per_worker, num_workers_per_host, timeout_s
    )


def get_num_workers() -> int:
    """Return the number of workers that the environment variable `TF_CONFIG` lists, or 1 if the variable is not set."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return len(config.get("cluster", {}).get("worker", [None]))
