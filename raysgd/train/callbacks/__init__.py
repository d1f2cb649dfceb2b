"""Callbacks for runs of `Trainer`: the base class and ready-made ones.

Each callback sees the reports of all workers, or of those that its preprocessor chooses. An exception in a callback
ends the run; all callbacks get `finish_training`.
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
