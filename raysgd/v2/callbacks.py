"""The former `ray.util.sgd.v2.callbacks`: the names of `raysgd.train.callbacks`, and the old name `SGDCallback`."""

from raysgd.train import callbacks
from raysgd.train.callbacks import *  # noqa: F403 - all names, as in the former module
from raysgd.train.callbacks import TrainingCallback as SGDCallback

__all__ = ["SGDCallback"]
__all__ += callbacks.__all__
