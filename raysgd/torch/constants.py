"""Constants of `raysgd.torch` that user code may import: config keys, their values, and timeouts."""

from __future__ import annotations

from raysgd.core.arguments import integer_from_environment

USE_FP16 = "__use_fp16__"
NUM_STEPS = "__num_steps__"

SCHEDULER_STEP = "scheduler_step"
SCHEDULER_STEP_BATCH = "batch"
SCHEDULER_STEP_EPOCH = "epoch"
SCHEDULER_STEP_MANUAL = "manual"
VALID_SCHEDULER_STEP = {SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL}


# Default timeout, in seconds, of collectives in an NCCL process group.
NCCL_TIMEOUT_S = integer_from_environment("NCCL_TIMEOUT_S", 1800, " of seconds")
# Longest time, in seconds, that a trainer waits at startup for Ray to reserve the workers' resources.
SGD_PLACEMENT_GROUP_TIMEOUT_S = integer_from_environment("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100, " of seconds")
