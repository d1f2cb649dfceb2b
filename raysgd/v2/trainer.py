"""`Trainer` whose `run` has the argument order of `ray.util.sgd.v2`, in which `checkpoint` precedes `dataset`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysgd import train
from raysgd.train import CheckpointStrategy, TrainingCallback, TrainingIterator
from raysgd.train.trainer import TrainingIterator as SGDIterator
from raysgd.train.trainer import TrainWorkerGroup as SGDWorkerGroup

__all__ = ["SGDIterator", "SGDWorkerGroup", "Trainer"]


class Trainer(train.Trainer):
    """`raysgd.train.Trainer` with the argument order of `ray.util.sgd.v2`.

    Pass the newer argument `dataset` by name.
    """

    def run(  # type: ignore[override]
        self,
        train_func: Callable[..., Any],
        config: Any = None,
        callbacks: Sequence[TrainingCallback] | None = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
        *,
        dataset: Any = None,
    ) -> list[Any]:
        """Run a function on all workers until every worker has finished. See `raysgd.train.Trainer.run`."""
        return super().run(train_func, config, callbacks, dataset, checkpoint, checkpoint_strategy)

    def run_iterator(  # type: ignore[override]
        self,
        train_func: Callable[..., Any],
        config: Any = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
        *,
        dataset: Any = None,
    ) -> TrainingIterator:
        """Start a function on all workers and return an iterator over its reports. The arguments are those of `run`."""
        return super().run_iterator(train_func, config, dataset, checkpoint, checkpoint_strategy)
