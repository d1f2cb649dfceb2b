"""Connects Lightning's `Trainer` to a run of `fit`, with strategies for the run's workers and a reporting callback."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.reports import CheckpointUploadMode, UploadOptions
from raysgd.core.imports import require
from raysgd.train import session
from raysgd.train._torch.prepared import get_device
from raysgd.train.collective import barrier

__all__ = [
    "RayDDPStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]


def _imported(module: str) -> Any:
    """Import a module of Lightning from the package that the program already uses: `lightning` or `pytorch_lightning`.

    Objects of these two packages cannot be mixed. If the program has imported neither, use `lightning`.
    """
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        return importlib.import_module(f"pytorch_lightning.{module}")
    require("lightning", extra="lightning", purpose="`raysgd.train.lightning`")
    return importlib.import_module(f"lightning.pytorch.{module}")


_DDPStrategy: Any = _imported("strategies").DDPStrategy
_FSDPStrategy: Any = _imported("strategies").FSDPStrategy
_Environment: Any = _imported("plugins.environments").LightningEnvironment
_Callback: Any = _imported("callbacks").Callback


class _PlaceOfWorker:
    """Mixin for Lightning strategies that makes them use this worker's device and rank."""

    @property
    def root_device(self) -> Any:
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": session.world_size(), "rank": session.world_rank()}


class RayDDPStrategy(_PlaceOfWorker, _DDPStrategy):
    """Lightning's `DDPStrategy`, with the same arguments, but on the workers that `fit` has started."""


class RayFSDPStrategy(_PlaceOfWorker, _FSDPStrategy):
    """Lightning's `FSDPStrategy`, with the same arguments, but on the workers that `fit` has started."""


class RayLightningEnvironment(_Environment):
    """Gives Lightning this worker's rank, and makes Lightning use the running workers instead of new processes."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        """Return the number of workers."""
        return session.world_size()

    def global_rank(self) -> int:
        """Return this worker's rank among all workers."""
        return session.world_rank()

    def local_rank(self) -> int:
        """Return this worker's rank among the workers on its node."""
        return session.local_rank()

    def node_rank(self) -> int:
        """Return the rank of this worker's node."""
        return session.get_node_rank()

    def set_world_size(self, size: int) -> None:
        """Do nothing, because raysgd has already set the number of workers."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because raysgd has already set this worker's rank."""

    def teardown(self) -> None:
        """Do nothing, because the worker is still needed when Lightning's `Trainer` has ended."""


class RayTrainReportCallback(_Callback):
    """Reports the logged metrics after each epoch, with a Lightning checkpoint in `checkpoint.ckpt`.

    Args:
        checkpoint_upload_mode: `CheckpointUploadMode.SYNC` or `ASYNC`; None for `SYNC`. See `raysgd.train.report`.
        validation: Must be False, because Lightning's own loop validates.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(self, checkpoint_upload_mode: Any = None, validation: Any = False) -> None:
        super().__init__()
        mode = checkpoint_upload_mode or CheckpointUploadMode.SYNC
        self._options = {"checkpoint_upload_mode": mode, "validation": validation}
        UploadOptions(**self._options)  # created only because it validates the options

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save a Lightning checkpoint and report it with the logged metrics. Called on all ranks."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        is_async = self._options["checkpoint_upload_mode"] is CheckpointUploadMode.ASYNC
        folder, has_files = tempfile.mkdtemp(prefix="raysgd-lightning-"), False
        try:
            trainer.save_checkpoint(Path(folder, self.CHECKPOINT_NAME).as_posix(), weights_only=False)
            has_files = any(Path(folder).iterdir())  # if the model is not sharded, only rank 0 writes files
            if has_files:
                session.report(metrics, checkpoint=Checkpoint.from_directory(folder), **self._options)
            else:
                session.report(metrics)
            if not is_async:  # a barrier waits until the checkpoint is stored
                barrier()
        finally:
            if not (is_async and has_files):  # in ASYNC mode, `report` deletes the folder after the upload
                shutil.rmtree(folder, ignore_errors=True)


def prepare_trainer(trainer: Any) -> Any:
    """Check that Lightning's `Trainer` can train on the run's workers, and return it.

    Raises:
        RuntimeError: The trainer's strategy or environment would start other processes.
    """
    allowed = (RayDDPStrategy, RayFSDPStrategy)
    if not isinstance(trainer.strategy, allowed):
        names = " or ".join(f"`{each.__name__}`" for each in allowed)
        raise RuntimeError(
            f"`Trainer(strategy={type(trainer.strategy).__name__}(...))`: need {names} of `raysgd.train.lightning`."
        )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if not isinstance(environment, RayLightningEnvironment):
        raise RuntimeError(
            f"`Trainer(plugins=...)` has `{type(environment).__name__}` as its environment: pass "
            "`plugins=[raysgd.train.lightning.RayLightningEnvironment()]`."
        )
    return trainer
