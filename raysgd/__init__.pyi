"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from typing import NoReturn

from raysgd._version import __version__ as __version__
from raysgd.core.engine.shared.interface import GroupEvent as GroupEvent
from raysgd.core.history.history import CallRecord as CallRecord
from raysgd.core.history.history import History as History
from raysgd.core.history.status import TrainerStatus as TrainerStatus
from raysgd.detached.cluster import attach as attach
from raysgd.detached.cluster import detached_trainers as detached_trainers
from raysgd.detached.protocol import Detached as Detached
from raysgd.exceptions import Preempted as Preempted
from raysgd.tf.tf_trainer import TFTrainer as TFTrainer
from raysgd.torch.creator_operator import CreatorOperator as CreatorOperator
from raysgd.torch.torch_trainer import TorchTrainer as TorchTrainer
from raysgd.torch.training_operator import TrainingOperator as TrainingOperator
from raysgd.trainer.configuration import Recovery as Recovery

from . import air as air
from . import callbacks as callbacks
from . import data as data
from . import exceptions as exceptions
from . import operators as operators
from . import replay as replay
from . import storage as storage
from . import testing as testing
from . import tf as tf
from . import torch as torch
from . import train as train
from . import tune as tune
from . import utils as utils

def PyTorchTrainer(*args: object, **kwargs: object) -> NoReturn: ...
