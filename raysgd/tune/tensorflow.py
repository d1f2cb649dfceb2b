"""A function for several workers with TensorFlow as a trial of Ray Tune, like `ray.tune.integration.tensorflow`."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from raysgd import train
from raysgd.train.tensorflow import TensorflowConfig

_FILES = "files"


def DistributedTrainableCreator(
    func: Callable[..., Any],
    num_workers: int = 2,
    num_gpus_per_worker: float = 0,
    num_cpus_per_worker: float = 1,
    num_workers_per_host: int | None = None,
    timeout_s: float = 15 * 60,
) -> type[Any]:
    """A class for `ray.tune`: each trial runs `func(config, checkpoint_dir=None)` on workers of its own.

    `TF_CONFIG` is set in each of them before `func` runs, so it may make a `MultiWorkerMirroredStrategy`. It reports
    with `raysgd.train.report`; what rank 0 reports counts. It saves with `distributed_checkpoint_dir`, and finds what
    was saved last in the folder `checkpoint_dir`, also after a worker was lost and the function restarted.

    Args:
        func: The function.
        num_workers: How many workers a trial has.
        num_gpus_per_worker: GPUs for each.
        num_cpus_per_worker: CPUs for each.
        num_workers_per_host: Refused: Tune reserves the resources of a trial, and Ray chooses the nodes.
        timeout_s: Accepted, as in the old library, where it bounded the wait for a reservation by host. How long a
            trial waits for its resources is Tune's affair.

    Raises:
        ValueError: `func` cannot be called like that, a number is out of range, or `num_workers_per_host` was passed.
        ImportError: Ray Tune or TensorFlow is not installed.
    """
    if num_workers_per_host is not None:
        raise ValueError(
            f"`num_workers_per_host={num_workers_per_host!r}` is not supported: Ray Tune reserves one bundle of "
            "resources for each worker, as close together as there is room, and Ray chooses the nodes. Leave it out; "
            "to keep workers apart give each as many CPUs or GPUs as only one of them finds on a node."
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise ValueError(f"`timeout_s={timeout_s!r}`: need a positive number of seconds.")
    try:
        inspect.signature(func).bind({}, checkpoint_dir=None)
    except TypeError as error:
        raise ValueError(
            f"`{getattr(func, '__name__', func)}` cannot be called as `func(config, checkpoint_dir=None)` ({error}): "
            "give it these two parameters."
        ) from None
    trainer = train.Trainer(
        TensorflowConfig(),
        num_workers,
        use_gpu=num_gpus_per_worker > 0,
        resources_per_worker={"CPU": num_cpus_per_worker, "GPU": num_gpus_per_worker},
    )
    return trainer.to_tune_trainable(partial(_run, func))


def _run(func: Callable[..., Any], config: dict[str, Any]) -> Any:
    """In a worker: unpacks what was saved last, and runs the function."""
    saved = train.load_checkpoint()
    if not saved:
        return func(config, checkpoint_dir=None)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in saved[_FILES].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return func(config, checkpoint_dir=folder)


@contextlib.contextmanager
def distributed_checkpoint_dir(step: int, disable: bool = False) -> Iterator[str]:
    """A folder to save into, on every worker. What rank 0 leaves there is the checkpoint; the rest is deleted.

    Args:
        step: What the checkpoint is of.
        disable: Whether to keep nothing at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        if disable:
            return
        files = [path for path in Path(folder).rglob("*") if path.is_file()] if train.world_rank() == 0 else []
        content = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        train.save_checkpoint(step=step, **{_FILES: content})


def get_num_workers() -> int:
    """How many workers there are, as `TF_CONFIG` says; 1 where it is not set."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return len(config.get("cluster", {}).get("worker", [None]))
