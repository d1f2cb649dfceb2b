"""Runs a PyTorch training function on several workers as a Ray Tune trial.

The functions are those of the former `ray.tune.integration.torch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.exceptions import RemovedNameError
from raysgd.torch.constants import NCCL_TIMEOUT_S
from raysgd.train.torch import TorchConfig
from raysgd.tune._distributed import distributed_checkpoint_dir, is_distributed_trainable, make_distributed

__all__ = ["DistributedTrainableCreator", "distributed_checkpoint_dir", "is_distributed_trainable"]


def DistributedTrainableCreator(
    func: Callable[..., Any],
    num_workers: int = 1,
    num_cpus_per_worker: float = 1,
    num_gpus_per_worker: float = 0,
    num_workers_per_host: int | None = None,
    backend: str = "gloo",
    timeout_s: float = NCCL_TIMEOUT_S,
    use_gpu: bool | None = None,
) -> type[Any]:
    """Return a trainable class for `ray.tune`. Each trial runs `func(config, checkpoint_dir=None)` on separate workers.

    The `torch.distributed` process group is created before `func` runs. `func` reports metrics with
    `raysgd.train.report`, and saves checkpoints with `distributed_checkpoint_dir`. Only rank 0's reports reach Tune.
    When `func` starts from a checkpoint, for example after a worker was lost, `checkpoint_dir` is a folder with the
    checkpoint's files.

    Args:
        func: The training function, which each worker runs.
        num_workers: Number of workers per trial.
        num_cpus_per_worker: CPUs per worker.
        num_gpus_per_worker: GPUs per worker.
        num_workers_per_host: Exact number of workers on each node; it must divide `num_workers`. Default: Ray chooses
            the nodes.
        backend: "gloo" or "nccl".
        timeout_s: Timeout of collective operations in seconds. It does not limit how long a trial waits for resources.
        use_gpu: No longer supported. Use `num_gpus_per_worker` instead.

    Raises:
        RemovedNameError: `use_gpu` is True.
        ValueError: `func` cannot be called with a config and `checkpoint_dir`, or an argument is out of range.
        ImportError: Ray Tune is not installed.

    Examples:
        >>> def train_func(config, checkpoint_dir=None):
        ...     for epoch in range(config["num_epochs"]):
        ...         raysgd.train.report(loss=...)
        >>> trainable_cls = DistributedTrainableCreator(train_func, num_workers=2)  # doctest: +SKIP
        >>> ray.tune.Tuner(trainable_cls, param_space={"num_epochs": 3}).fit()  # doctest: +SKIP
    """
    if use_gpu:
        raise RemovedNameError("`use_gpu` is no longer used: pass `num_gpus_per_worker=1` to give workers GPUs.")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f'`backend={backend!r}`: allowed are "gloo" and "nccl".')
    config = TorchConfig(backend=backend, timeout_s=timeout_s)  # type: ignore[arg-type]
    return make_distributed(
        func, config, num_workers, num_cpus_per_worker, num_gpus_per_worker, num_workers_per_host, timeout_s
    )
