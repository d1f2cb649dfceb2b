"""Options for reports, the metrics that the driver adds to reports, and the nodes that Ray will soon take away."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

TRAINING_ITERATION = "training_iteration"
TIME_THIS_ITER_S = "time_this_iter_s"
TIME_TOTAL_S = "time_total_s"
TIMESTAMP = "timestamp"
DONE = "done"
CHECKPOINT_DIR_NAME = "checkpoint_dir_name"
SHOULD_CHECKPOINT = "should_checkpoint"


class CheckpointUploadMode(Enum):
    """Mode in which `report` stores a checkpoint.

    With `SYNC`, `report` returns once a checkpoint folder is stored. With `ASYNC`, it returns immediately, unless the
    previous folder is still being stored. In both modes, a dict checkpoint is copied, and the copy is sent while the
    function continues. `NO_UPLOAD` is not supported.
    """

    ASYNC = "ASYNC"
    SYNC = "SYNC"
    NO_UPLOAD = "NO_UPLOAD"


@dataclass(frozen=True)
class PreemptionInfo:
    """Lists the workers' nodes that are about to be taken away.

    Attributes:
        deadline_ms: Earliest time at which a node is taken away or the run ends, in milliseconds of Unix time; None if
            Ray does not know the time.
        preempted_node_to_ranks: The ranks on each node, by node id.
    """

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """The sorted IDs of the nodes that will be taken away."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The sorted ranks of the workers on nodes that will be taken away."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


@dataclass(frozen=True)
class UploadOptions:
    """Options for storing a report's checkpoint, named as in Ray's `report`.

    Only `checkpoint_upload_mode` and `delete_local_checkpoint_after_upload` can be set.

    Raises:
        ValueError: Another option is set, or the upload mode is neither `SYNC` nor `ASYNC`.
    """

    checkpoint_dir_name: str | None = None
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    delete_local_checkpoint_after_upload: bool | None = None
    checkpoint_upload_fn: Any = None
    validation: Any = False

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoint_upload_mode, CheckpointUploadMode):
            raise ValueError(
                f"`checkpoint_upload_mode={self.checkpoint_upload_mode!r}`: need a "
                "`raysgd.train.CheckpointUploadMode`: `SYNC` or `ASYNC`. That of Ray has the same name, but is another "
                "class."
            )
        for name, advice in _NOT_DONE.items():
            if (value := getattr(self, name)) not in (None, False, *_DONE):
                raise ValueError(f"`{name}={value!r}`: {advice}")

    @property
    def is_async(self) -> bool:
        """True if the function continues while the checkpoint is stored."""
        return self.checkpoint_upload_mode is CheckpointUploadMode.ASYNC

    @property
    def deletes(self) -> bool:
        """True if the local folder that the user passed is deleted after the checkpoint is stored."""
        chosen = self.delete_local_checkpoint_after_upload
        return self.is_async if chosen is None else chosen


_DONE = (CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC)
_NOT_DONE: Mapping[str, str] = {
    "checkpoint_dir_name": "checkpoints are numbered, and a run continues from the highest one. Put the name into the "
    "metrics, or into the checkpoint with `set_metadata`.",
    "checkpoint_upload_mode": "a checkpoint that is not stored in the folder of the run cannot be restored, and is not "
    "counted by `num_to_keep`. Use `SYNC` or `ASYNC`; a folder in the same store is copied by the worker.",
    "checkpoint_upload_fn": "workers store checkpoints themselves. For another store pass "
    "`RunConfig(storage_path=..., storage_filesystem=...)`.",
    "validation": "checkpoints are not validated in tasks of their own. Validate in the function, and report what you "
    "find with the checkpoint.",
}


EXPERIMENT_TAG = "0"
"""Tag of the only trial of a `fit()` run."""

OF_TRIAL = frozenset({"config", "trial_id", "experiment_tag"})
"""Report keys that identify the trial."""

OF_PLACE = frozenset({"date", "pid", "hostname", "node_ip"})
"""Report keys for the time, process and machine of a report. They are not metrics."""

FILLED_IN = (
    OF_TRIAL
    | OF_PLACE
    | {
        CHECKPOINT_DIR_NAME,
        DONE,
        SHOULD_CHECKPOINT,
        TIMESTAMP,
        TIME_THIS_ITER_S,
        TIME_TOTAL_S,
        TRAINING_ITERATION,
        "iterations_since_restore",
        "time_since_restore",
    }
)
"""All keys that raysgd adds to reports. They are not metrics of the user."""

_REPLACED = FILLED_IN - {DONE, SHOULD_CHECKPOINT, TIMESTAMP, TIME_THIS_ITER_S}
"""Keys under which raysgd overwrites what the training function has reported.

Under the other keys in `FILLED_IN`, a value that the function has reported is kept.
"""


def iteration_of(report: Mapping[str, Any]) -> int:
    """Return a report's `training_iteration`, its number counted from 1. Return 0 if it is missing or damaged."""
    return int(_number(report.get(TRAINING_ITERATION)))


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and abs(value) < 1e15 else 0  # a damaged file may contain any value


class MetricsFiller:
    """Adds to each report the values that Ray Tune would add: counters, times, host and config.

    Args:
        trial_id: Id of the trial.
        config: The config of the trial.
        clock: Returns the Unix time in seconds.

    Attributes:
        iteration: Number of reports so far.
    """

    def __init__(
        self,
        trial_id: str,
        config: Mapping[str, Any],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._constant = {"config": dict(config), "experiment_tag": EXPERIMENT_TAG}
        self._trial_id = trial_id
        self._clock = clock
        self._has_warned = False
        self.begin_attempt({})

    def begin_attempt(self, report: Mapping[str, Any]) -> None:
        """Prepare for another attempt of the run: continue the iteration count and total time from a report.

        A count or time that is missing or damaged in the report starts at 0.
        """
        self.iteration = self._began_at = iteration_of(report)
        self._time_total_s = self._began_at_s = float(_number(report.get(TIME_TOTAL_S)))
        self._last = self._clock()

    def fill(self, metrics: Mapping[str, Any], checkpoint_name: str | None) -> dict[str, Any]:
        """Return a copy of a report's metrics with the values that raysgd adds.

        Values that the training function has reported under the keys in `_REPLACED` are overwritten.
        """
        now = self._clock()
        names = sorted(_REPLACED & metrics.keys())
        if names and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "these metrics are replaced by what a run fills in: %s. Report them under other names",
                ", ".join(f"`{name}`" for name in names),
            )
        reported = metrics.get(TIME_THIS_ITER_S)
        time_this_iter_s = float(reported) if reported is not None else now - self._last
        self._last = now
        self.iteration += 1
        self._time_total_s += time_this_iter_s
        return {
            **metrics,
            CHECKPOINT_DIR_NAME: checkpoint_name,
            **({SHOULD_CHECKPOINT: True} if checkpoint_name is not None else {}),
            DONE: bool(metrics.get(DONE, False)),
            TRAINING_ITERATION: self.iteration,
            **self._where_and_when(metrics.get(TIMESTAMP) or int(now)),
            TIME_THIS_ITER_S: time_this_iter_s,
            TIME_TOTAL_S: self._time_total_s,
            "time_since_restore": self._time_total_s - self._began_at_s,
            "iterations_since_restore": self.iteration - self._began_at,
            **self._constant,
        }

    def initial(self) -> dict[str, Any]:
        """Return the values added by raysgd that are known before the first report, such as the host and the config."""
        return {**self._where_and_when(int(self._clock())), "config": self._constant["config"]}

    def _where_and_when(self, timestamp: Any) -> dict[str, Any]:
        return {
            "trial_id": self._trial_id,
            "date": time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(float(timestamp))),
            TIMESTAMP: timestamp,
            "pid": os.getpid(),
            "hostname": platform.node(),
            "node_ip": node_ip(),
        }


@cache
def node_ip() -> str:
    """Return the IP address that Ray uses for this node."""
    import ray

    return str(ray.util.get_node_ip_address())
