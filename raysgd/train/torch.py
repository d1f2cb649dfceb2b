"""PyTorch in training functions: the process group, and helpers for models, loaders, optimizers and mixed precision.

The helpers work inside a function that a trainer runs. They get what the function already has ready for several
workers, and leave it as it is for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._imports import lazy_names
from raysgd.train._torch.accelerator import accelerate, enable_reproducibility, get_device, get_devices
from raysgd.train._torch.checkpoint import TorchCheckpoint
from raysgd.train._torch.global_steps import batch_failed
from raysgd.train._torch.loaders import prepare_data_loader
from raysgd.train._torch.prepared import (
    backward,
    gather_state,
    load_state,
    prepare_model,
    prepare_optimizer,
    prepare_state,
)
from raysgd.train._torch.process_group import TorchBackend, TorchConfig
from raysgd.train._torch.profiler import TorchWorkerProfiler

if TYPE_CHECKING:
    from raysgd.train._torch.predictor import TorchPredictor
    from raysgd.train.data_parallel_trainer import TorchTrainer

__all__ = [
    "TorchBackend",
    "TorchCheckpoint",
    "TorchConfig",
    "TorchPredictor",
    "TorchTrainer",
    "TorchWorkerProfiler",
    "accelerate",
    "backward",
    "batch_failed",
    "enable_reproducibility",
    "gather_state",
    "get_device",
    "get_devices",
    "load_state",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "prepare_state",
]
lazy_names(
    __name__, {"TorchPredictor": "raysgd.train._torch.predictor", "TorchTrainer": "raysgd.train.data_parallel_trainer"}
)
