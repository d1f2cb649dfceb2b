"""Callbacks for runs of `Trainer`: the base class and ready-made callbacks.

Each callback receives the reports of all workers, or of the workers that its preprocessor selects. An exception in a
callback ends the run, and `finish_training` is called on all callbacks.
"""

from __future__ import annotations

from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.logging import JsonLoggerCallback, MLflowLoggerCallback, TBXLoggerCallback
from raysgd.train.callbacks.print import PrintCallback
from raysgd.train.callbacks.profile import TorchTensorboardProfilerCallback

__all__ = [
    "JsonLoggerCallback",
    "MLflowLoggerCallback",
    "PrintCallback",
    "TBXLoggerCallback",
    "TorchTensorboardProfilerCallback",
    "TrainingCallback",
]
