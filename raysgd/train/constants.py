"""Names and defaults that code written for the old library may import."""

from __future__ import annotations

import os
from pathlib import Path

from raysgd.air.constants import EVALUATION_DATASET_KEY as EVALUATION_DATASET_KEY
from raysgd.air.constants import MODEL_KEY as MODEL_KEY
from raysgd.air.constants import PREPROCESSOR_KEY as PREPROCESSOR_KEY
from raysgd.air.constants import TIME_THIS_ITER_S as TIME_THIS_ITER_S
from raysgd.air.constants import TIMESTAMP as TIMESTAMP
from raysgd.air.constants import TRAIN_DATASET_KEY as TRAIN_DATASET_KEY
from raysgd.air.constants import TRAINING_ITERATION as TRAINING_ITERATION
from raysgd.air.constants import WILDCARD_KEY as WILDCARD_KEY
from raysgd.core.arguments import integer_from_environment

BASIC_AUTOFILLED_KEYS = {TIMESTAMP, TIME_THIS_ITER_S, TRAINING_ITERATION}

# Keys that are added to reports if the environment variable TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS is 1.
DATE = "_date"
HOSTNAME = "_hostname"
NODE_IP = "_node_ip"
PID = "_pid"
TIME_TOTAL_S = "_time_total_s"
DETAILED_AUTOFILLED_KEYS = {DATE, HOSTNAME, NODE_IP, PID, TIME_TOTAL_S}

# Keys in reports that are meant for one callback and are hidden from other callbacks.
PYTORCH_PROFILER_KEY = "_train_torch_profiler"
ALL_RESERVED_KEYS = {PYTORCH_PROFILER_KEY}

DEFAULT_RESULTS_DIR = Path("~/ray_results").expanduser()
TRAIN_CHECKPOINT_SUBDIR = "checkpoints"
RESULT_FILE_JSON = "results.json"
TUNE_CHECKPOINT_FILE_NAME = "checkpoint"
TUNE_CHECKPOINT_ID = "_current_checkpoint_id"
METADATA_KEY = "_raysgd_metadata"  # in a checkpoint dict on its way to the driver
RESULT_FETCH_TIMEOUT = 0.2  # seconds between two polls in the old library; not used by raysgd
SESSION_MISUSE_LOG_ONCE_KEY = "train_warn_session_misuse"

# Environment variables that the driver reads when a `Trainer` is created, and when `fit` runs a training function.
ENABLE_DETAILED_AUTOFILLED_METRICS_ENV = "TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS"
ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV = "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES"
TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV = "TRAIN_PLACEMENT_GROUP_TIMEOUT_S"
TRAIN_ENABLE_WORKER_SPREAD_ENV = "TRAIN_ENABLE_WORKER_SPREAD"
_FIRST_NAMES = {  # the names that two of these environment variables had in `ray.util.sgd.v2`
    ENABLE_DETAILED_AUTOFILLED_METRICS_ENV: "SGD_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS",
    ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV: "SGD_ENABLE_SHARE_CUDA_VISIBLE_DEVICES",
}


def env_integer(name: str, default: int) -> int:
    """Return the integer in an environment variable, which may also be set under its former name.

    Return `default` if neither variable is set.

    Raises:
        ValueError: The value is not an integer.
    """
    if name not in os.environ:
        name = _FIRST_NAMES.get(name, name)
    return integer_from_environment(name, default)
