"""Defines `Trainer`, a `raysgd.train.Trainer` whose methods take their arguments in the order of `ray.util.sgd.v2`."""

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
    """A `raysgd.train.Trainer` whose methods take their arguments in the order of `ray.util.sgd.v2`.

    In `raysgd.train.Trainer`, `dataset` precedes `checkpoint`. Here, `dataset` must be passed by name.
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
        """Run a training function on all workers until it has ended on each of them, and return the results.

        Except for their order, the arguments are those of `raysgd.train.Trainer.run`.
        """
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
        """Start a training function on all workers, and return an iterator over its reports.

        The arguments are those of `run`, without `callbacks`.
        """
        return super().run_iterator(train_func, config, dataset, checkpoint, checkpoint_strategy)
