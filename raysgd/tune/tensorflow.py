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
) -> type[Any]:
    """A class for `ray.tune`: each trial runs `func(config, checkpoint_dir=None)` on workers of its own.

    `TF_CONFIG` is set in each of them before `func` runs, so it may make a `MultiWorkerMirroredStrategy`. It reports
    with `raysgd.train.report`; what rank 0 reports counts. It saves with `distributed_checkpoint_dir`, and finds what
    was saved last in the folder `checkpoint_dir`, also after a worker was lost and the function started anew.

    Args:
        func: The function.
        num_workers: How many workers a trial has.
        num_gpus_per_worker: GPUs for each.
        num_cpus_per_worker: CPUs for each.

    Raises:
        ValueError: `func` cannot be called like that, or a number is out of range.
        ImportError: Ray Tune or TensorFlow is not installed.
    """
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
