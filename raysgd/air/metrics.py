"""The metrics of a report as the driver keeps them: what the function reported, and what is filled in."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

TRAINING_ITERATION = "training_iteration"
TIME_THIS_ITER_S = "time_this_iter_s"
TIME_TOTAL_S = "time_total_s"
TIMESTAMP = "timestamp"
DONE = "done"
CHECKPOINT_DIR_NAME = "checkpoint_dir_name"
SHOULD_CHECKPOINT = "should_checkpoint"

OF_TRIAL = frozenset({"config", "trial_id", "experiment_tag"})
"""The keys of a report that say which trial it is of."""

OF_PLACE = frozenset({"date", "pid", "hostname", "node_ip"})
"""Those that say where and when it was made, and are no numbers to look at."""

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
"""All that are filled in: they are no metrics of the user."""


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run.

    Attributes:
        iteration: The number of reports.
        time_total_s: How long they took, in seconds.
    """

    iteration: int = 0
    time_total_s: float = 0.0

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> RunProgress:
        """The progress at one report, from its line in `result.json`. What is missing there counts as 0."""
        return cls(
            int(_number(result.get(TRAINING_ITERATION))),
            float(_number(result.get(TIME_TOTAL_S))),
        )

    def after(self, time_this_iter_s: float) -> RunProgress:
        """The progress after one more report."""
        return replace(self, iteration=self.iteration + 1, time_total_s=self.time_total_s + time_this_iter_s)


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and abs(value) < 1e15 else 0  # also of a file that was damaged


class MetricsFiller:
    """Adds to each report what Ray Tune adds: counters, times, where and with which config it ran.

    Args:
        trial_id: Identity of the trial.
        config: The config of the trial.
        experiment_tag: The tag of the trial.
        clock: The time, in seconds since 1970.
    """

    def __init__(
        self,
        trial_id: str,
        config: Mapping[str, Any],
        experiment_tag: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._constant = {"config": dict(config), "experiment_tag": experiment_tag}
        self._trial_id = trial_id
        self._clock = clock
        self._last = clock()
        self._began_at = RunProgress()
        self.progress = RunProgress()

    def begin(self, progress: RunProgress) -> None:
        """Begins an attempt that continues from `progress`."""
        self._began_at = self.progress = progress
        self._last = self._clock()

    def fill(self, metrics: Mapping[str, Any], checkpoint_name: str | None) -> dict[str, Any]:
        """The whole report. Keys that are filled in replace those of the function, except for the two times."""
        now = self._clock()
        reported = metrics.get(TIME_THIS_ITER_S)
        time_this_iter_s = float(reported) if reported is not None else now - self._last
        self._last = now
        self.progress = self.progress.after(time_this_iter_s)
        return {
            **metrics,
            CHECKPOINT_DIR_NAME: checkpoint_name,
            **({SHOULD_CHECKPOINT: True} if checkpoint_name is not None else {}),
            DONE: bool(metrics.get(DONE, False)),
            TRAINING_ITERATION: self.progress.iteration,
            **self._where_and_when(metrics.get(TIMESTAMP) or int(now)),
            TIME_THIS_ITER_S: time_this_iter_s,
            TIME_TOTAL_S: self.progress.time_total_s,
            "time_since_restore": self.progress.time_total_s - self._began_at.time_total_s,
            "iterations_since_restore": self.progress.iteration - self._began_at.iteration,
            **self._constant,
        }

    def initial(self) -> dict[str, Any]:
        """Return what is known before the first report."""
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
    """Return the address of this node, as Ray knows it."""
    import ray

    return str(ray.util.get_node_ip_address())
