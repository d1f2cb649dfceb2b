"""Lightning's `Trainer` in a function that `fit` runs: its place among the workers, and a report after each epoch."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from raysgd._imports import require
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.reports import CheckpointUploadMode, UploadOptions
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
    """A module of Lightning as the program has imported it: its two packages have the same classes, each its own."""
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        return importlib.import_module(f"pytorch_lightning.{module}")
    require("lightning", extra="lightning", purpose="`raysgd.train.lightning`")
    return importlib.import_module(f"lightning.pytorch.{module}")


_DDPStrategy: Any = _imported("strategies").DDPStrategy
_FSDPStrategy: Any = _imported("strategies").FSDPStrategy
_Environment: Any = _imported("plugins.environments").LightningEnvironment
_Callback: Any = _imported("callbacks").Callback


class _PlaceOfWorker:
    """The place of a strategy, from the run."""

    @property
    def root_device(self) -> Any:
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": session.world_size(), "rank": session.world_rank()}


class RayDDPStrategy(_PlaceOfWorker, _DDPStrategy):
    """`DDPStrategy` over the workers of the run. Takes the same arguments."""


class RayFSDPStrategy(_PlaceOfWorker, _FSDPStrategy):
    """`FSDPStrategy` over the workers of the run. Takes the same arguments."""


class RayLightningEnvironment(_Environment):
    """Tells Lightning that the workers are there already, and which one this is."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        """The number of workers."""
        return session.world_size()

    def global_rank(self) -> int:
        """This worker's rank among all."""
        return session.world_rank()

    def local_rank(self) -> int:
        """This worker's rank among those on its node."""
        return session.local_rank()

    def node_rank(self) -> int:
        """The rank of this worker's node."""
        return session.get_node_rank()

    def set_world_size(self, size: int) -> None:
        """Nothing: the run has decided."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the run has decided."""

    def teardown(self) -> None:
        """Nothing: the run goes on."""


class RayTrainReportCallback(_Callback):
    """Reports what was logged at the end of each epoch, with a checkpoint of Lightning in `checkpoint.ckpt`.

    Args:
        checkpoint_upload_mode: `CheckpointUploadMode.SYNC` or `ASYNC`; None for `SYNC`. See `raysgd.train.report`.
        validation: False: Lightning's own loop validates.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(self, checkpoint_upload_mode: Any = None, validation: Any = False) -> None:
        super().__init__()
        mode = checkpoint_upload_mode or CheckpointUploadMode.SYNC
        self._options = {"checkpoint_upload_mode": mode, "validation": validation}
        UploadOptions(**self._options)  # checks them

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report on all ranks, as all of them have saved."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        folder = tempfile.mkdtemp(prefix="raysgd-lightning-")
        try:
            trainer.save_checkpoint(Path(folder, self.CHECKPOINT_NAME).as_posix(), weights_only=False)
            has_files = any(Path(folder).iterdir())  # rank 0 alone, where the model is not divided
            if has_files:
                session.report(metrics, checkpoint=Checkpoint.from_directory(folder), **self._options)
            else:
                session.report(metrics)
            barrier()
        finally:
            if self._options["checkpoint_upload_mode"] is not CheckpointUploadMode.ASYNC:
                shutil.rmtree(folder, ignore_errors=True)  # else it is deleted when it is stored


def prepare_trainer(trainer: Any) -> Any:
    """Return Lightning's `Trainer`, if it can train on the workers of the run.

    Raises:
        RuntimeError: Its strategy or its environment would start other processes.
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
