"""The public names and where they are defined: type checkers and `lazy_names` read this file."""

from raysgd.air.checkpoint import Checkpoint as Checkpoint
from raysgd.air.config import CheckpointConfig as CheckpointConfig
from raysgd.air.config import DatasetConfig as DatasetConfig
from raysgd.air.config import FailureConfig as FailureConfig
from raysgd.air.config import RunConfig as RunConfig
from raysgd.air.config import ScalingConfig as ScalingConfig
from raysgd.air.config import SyncConfig as SyncConfig
from raysgd.air.result import Result as Result
