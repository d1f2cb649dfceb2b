"""`ray.util.sgd.v2.callbacks` as it was: `raysgd.train.callbacks`, and `SGDCallback`."""

from raysgd.train.callbacks import (
    JsonLoggerCallback,
    MLflowLoggerCallback,
    PrintCallback,
    TBXLoggerCallback,
    TorchTensorboardProfilerCallback,
    TrainingCallback,
)
from raysgd.train.callbacks import TrainingCallback as SGDCallback

__all__ = [
    "JsonLoggerCallback",
    "MLflowLoggerCallback",
    "PrintCallback",
    "SGDCallback",
    "TBXLoggerCallback",
    "TorchTensorboardProfilerCallback",
    "TrainingCallback",
]
