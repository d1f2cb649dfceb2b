"""`ray.util.sgd.v2.callbacks` as it was."""

from raysgd.train.callbacks import JsonLoggerCallback, TBXLoggerCallback
from raysgd.train.callbacks import TrainingCallback as SGDCallback

__all__ = ["JsonLoggerCallback", "SGDCallback", "TBXLoggerCallback"]
