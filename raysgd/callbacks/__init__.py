"""Callbacks: objects whose methods are called during training, in the driver (`Callback`) or in the workers.

Callbacks in the workers derive from `WorkerCallback`. This package guarantees:

* The same `Callback` works in `trainer.fit`, in `Trainer.run` and in `RunConfig(callbacks=...)`.
* If a callback raises an error, the user gets an error that names the callback. The run ends cleanly, and the training
  state is not lost.
* Importing this package imports neither PyTorch nor TensorFlow.

Other modules decide when callbacks are called: `raysgd.trainer.driver.fit_loop` and `raysgd.train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.callbacks.averages import EMA, SWA
    from raysgd.callbacks.callback import Callback, Run
    from raysgd.callbacks.checkpointing import Checkpointing
    from raysgd.callbacks.early_stopping import EarlyStopping
    from raysgd.callbacks.loggers import (
        CometLogger,
        CSVLogger,
        JSONLogger,
        MLflowLogger,
        TensorBoardLogger,
        WandbLogger,
    )
    from raysgd.callbacks.monitors import (
        GoodputMonitor,
        GradientNorms,
        LearningRateMonitor,
        ProfilerTrace,
        ThroughputMonitor,
    )
    from raysgd.callbacks.progress import ProgressBar
    from raysgd.callbacks.report import HTMLReport
    from raysgd.callbacks.worker_callback import WorkerCallback

__all__ = [
    "EMA",
    "SWA",
    "CSVLogger",
    "Callback",
    "Checkpointing",
    "CometLogger",
    "EarlyStopping",
    "GoodputMonitor",
    "GradientNorms",
    "HTMLReport",
    "JSONLogger",
    "LearningRateMonitor",
    "MLflowLogger",
    "ProfilerTrace",
    "ProgressBar",
    "Run",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "WandbLogger",
    "WorkerCallback",
]

lazy_names(
    __name__,
    {
        "EMA": "raysgd.callbacks.averages",
        "SWA": "raysgd.callbacks.averages",
        "CSVLogger": "raysgd.callbacks.loggers",
        "Callback": "raysgd.callbacks.callback",
        "Checkpointing": "raysgd.callbacks.checkpointing",
        "CometLogger": "raysgd.callbacks.loggers",
        "EarlyStopping": "raysgd.callbacks.early_stopping",
        "GoodputMonitor": "raysgd.callbacks.monitors",
        "GradientNorms": "raysgd.callbacks.monitors",
        "HTMLReport": "raysgd.callbacks.report",
        "JSONLogger": "raysgd.callbacks.loggers",
        "LearningRateMonitor": "raysgd.callbacks.monitors",
        "MLflowLogger": "raysgd.callbacks.loggers",
        "ProfilerTrace": "raysgd.callbacks.monitors",
        "ProgressBar": "raysgd.callbacks.progress",
        "Run": "raysgd.callbacks.callback",
        "TensorBoardLogger": "raysgd.callbacks.loggers",
        "ThroughputMonitor": "raysgd.callbacks.monitors",
        "WandbLogger": "raysgd.callbacks.loggers",
        "WorkerCallback": "raysgd.callbacks.worker_callback",
    },
)
