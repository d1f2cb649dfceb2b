"""Runs the user's training function on several workers as a Ray Tune trial, with any framework."""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from raysgd import train
from raysgd.air.checkpoint import Checkpoint
from raysgd.core import arguments as checks
from raysgd.train._tune import make_trainable
from raysgd.train.backend import BackendConfig
from raysgd.train.trainer import Trainer

_FILES = "files"
_running: list[Callable[..., Any]] = []  # the training function, while it runs in this worker


def make_distributed(
    func: Callable[..., Any],
    backend: BackendConfig,
    num_workers: int,
    num_cpus: float,
    num_gpus: float,
    num_per_host: int | None,
    timeout_s: float,
) -> type[Any]:
    """Return a trainable class for `ray.tune` whose trials run `func` on several workers.

    Args:
        func: The training function, which each worker runs.
        backend: Config of the backend that connects the workers of a trial.
        num_workers: Number of workers per trial.
        num_cpus: CPUs per worker.
        num_gpus: GPUs per worker.
        num_per_host: Number of workers on each node. None if Ray chooses the nodes.
        timeout_s: Checked, but not used here. The caller puts the timeout into `backend` if the backend has one.

    Raises:
        ValueError: `func` cannot be called as `func(config, checkpoint_dir=None)`, a number is out of range, or
            `num_per_host` does not divide `num_workers`.
        ImportError: Ray Tune is not installed.
    """
    checks.check_seconds("timeout_s", timeout_s, may_be_least=False)
    checks.check_num_workers("num_workers", num_workers, hint="It is the number of workers of a trial.")
    checks.check_amount("num_cpus_per_worker", num_cpus)
    checks.check_amount("num_gpus_per_worker", num_gpus)
    if num_per_host is not None:
        checks.check_count("num_workers_per_host", num_per_host, hint="None leaves the choice of nodes to Ray.")
        if num_workers % num_per_host:
            raise ValueError(
                f"`num_workers_per_host={num_per_host}` does not divide `num_workers={num_workers}`: every node gets "
                "the same number of workers. Change one of the two."
            )
    try:
        inspect.signature(func).bind({}, checkpoint_dir=None)
    except TypeError as error:
        raise ValueError(
            f"`{getattr(func, '__name__', func)}` cannot be called as `func(config, checkpoint_dir=None)` ({error}): "
            "give it these two parameters."
        ) from None
    amounts = {"CPU": num_cpus, "GPU": num_gpus}
    make_trainer = partial(Trainer, backend, num_workers, use_gpu=num_gpus > 0, resources_per_worker=amounts)
    per_bundle = num_per_host or 1
    # The resources that Tune reserves for a trial. The first bundle is for the trial's own process, which only waits
    # for the workers and needs no resources. The other bundles are for the workers: one bundle per worker, or one
    # bundle per node if `num_per_host` is set.
    bundles: list[dict[str, float]] = [
        {},
        *[{name: each * per_bundle for name, each in amounts.items()}] * (num_workers // per_bundle),
    ]
    strategy = "PACK" if num_per_host is None else "STRICT_SPREAD"
    return make_trainable(make_trainer, partial(_run, func), None, bundles, strategy, refuses_more_steps=True)


def _run(func: Callable[..., Any], config: dict[str, Any]) -> Any:
    """Call the user's training function in a worker, and return its result.

    If the trial has a checkpoint, the argument `checkpoint_dir` is a temporary folder with the checkpoint's files.
    Otherwise, it is None.
    """
    _running.append(func)
    try:
        saved = train.load_checkpoint()
        with Checkpoint.from_dict(saved[_FILES]).as_directory() if saved else contextlib.nullcontext() as folder:
            return func(config, checkpoint_dir=folder)
    finally:
        _running.remove(func)


def is_distributed_trainable() -> bool:
    """Return True if this process is a worker that is running the training function of a Ray Tune trial."""
    return bool(_running)


@contextlib.contextmanager
def distributed_checkpoint_dir(step: int, disable: bool = False) -> Iterator[str]:
    """Context manager with which a training function saves a checkpoint. Every worker must use it at the same step.

    The context manager yields a temporary folder for the checkpoint's files. After the block, the files in rank 0's
    folder become the trial's checkpoint. The other ranks' files are deleted.

    Args:
        step: Training step at which the checkpoint is saved.
        disable: True to delete the files of all ranks, including rank 0, without saving a checkpoint. Must be the same
            on all ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        if not disable:
            content = Checkpoint.from_directory(folder).to_dict() if train.world_rank() == 0 else {}
            train.save_checkpoint(step=step, **{_FILES: content})
