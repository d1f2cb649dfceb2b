"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from raysgd.callbacks.averages import EMA as EMA
from raysgd.callbacks.averages import SWA as SWA
from raysgd.callbacks.callback import Callback as Callback
from raysgd.callbacks.callback import Run as Run
from raysgd.callbacks.checkpointing import Checkpointing as Checkpointing
from raysgd.callbacks.early_stopping import EarlyStopping as EarlyStopping
from raysgd.callbacks.guard import Guard as Guard
from raysgd.callbacks.loggers import CometLogger as CometLogger
from raysgd.callbacks.loggers import CSVLogger as CSVLogger
from raysgd.callbacks.loggers import JSONLogger as JSONLogger
from raysgd.callbacks.loggers import MLflowLogger as MLflowLogger
from raysgd.callbacks.loggers import TensorBoardLogger as TensorBoardLogger
from raysgd.callbacks.loggers import WandbLogger as WandbLogger
from raysgd.callbacks.monitors import GoodputMonitor as GoodputMonitor
from raysgd.callbacks.monitors import GradientNorms as GradientNorms
from raysgd.callbacks.monitors import LearningRateMonitor as LearningRateMonitor
from raysgd.callbacks.monitors import ProfilerTrace as ProfilerTrace
from raysgd.callbacks.monitors import ThroughputMonitor as ThroughputMonitor
from raysgd.callbacks.progress import ProgressBar as ProgressBar
from raysgd.callbacks.report import HTMLReport as HTMLReport
from raysgd.callbacks.worker_callback import WorkerCallback as WorkerCallback
