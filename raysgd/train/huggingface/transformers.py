"""Runs a `transformers.Trainer` inside `fit`: reports every save, and supports Ray Data batches as datasets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from raysgd.air.checkpoint import Checkpoint
from raysgd.core.imports import require
from raysgd.train import session

__all__ = ["RayTrainReportCallback", "prepare_trainer"]

transformers: Any = require("transformers", extra="hf", purpose="`raysgd.train.huggingface.transformers`")


class RayTrainReportCallback(transformers.TrainerCallback):
    """Reports the logged metrics with a checkpoint whenever the `transformers.Trainer` saves.

    The saved files are in the subfolder `checkpoint` of the reported checkpoint.
    """

    CHECKPOINT_NAME = "checkpoint"

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the logged metrics. The first rank on each node adds the files that its node's ranks have saved."""
        metrics = {name: value for logged in state.log_history for name, value in logged.items()}
        source = transformers.trainer_utils.get_last_checkpoint(args.output_dir) if session.local_rank() == 0 else None
        with tempfile.TemporaryDirectory(prefix="raysgd-transformers-") as folder:
            if source is not None:
                shutil.copytree(source, Path(folder, self.CHECKPOINT_NAME))
            session.report(metrics, checkpoint=Checkpoint.from_directory(folder) if source is not None else None)


class _Batches(IterableDataset[Any]):
    """A PyTorch dataset whose items are batches that Ray Data has already formed."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def prepare_trainer(trainer: Any) -> Any:
    """Let a `transformers.Trainer` use batches of Ray Data, such as `shard.iter_torch_batches(...)`, as its datasets.

    Returns:
        The same trainer. Its class is replaced by a subclass.
    """
    base: Any = type(trainer)

    class RayTransformersTrainer(base):
        """Mixin that lets a user's `transformers.Trainer` read batches of Ray Data."""

        def get_train_dataloader(self) -> Any:
            loader = _loader_of(self.train_dataset)
            return super().get_train_dataloader() if loader is None else loader

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            loader = _loader_of(self.eval_dataset if eval_dataset is None else eval_dataset)
            return super().get_eval_dataloader(eval_dataset) if loader is None else loader

    trainer.__class__ = RayTransformersTrainer
    return trainer


def _loader_of(data: Any) -> DataLoader[Any] | None:
    """Return a loader over data that consists of batches already, such as `shard.iter_torch_batches(...)`.

    Return None for an ordinary dataset, from which the `transformers.Trainer` forms batches itself.
    """
    is_dataset = isinstance(data, Dataset) or hasattr(data, "__getitem__") or not isinstance(data, Iterable)
    return None if is_dataset else DataLoader(_Batches(data), batch_size=None)
