"""The numbers of `trainer.status()` for whatever collects Ray's metrics. Without Ray nothing is reported."""

from __future__ import annotations

import sys
import time
from typing import Any

from raysgd.engine.history import History

_PAUSE_S = 1.0
_NAMES = {
    "raysgd_workers": "Workers of a trainer",
    "raysgd_samples_per_second": "Throughput of the last training call of a trainer",
    "raysgd_losses": "Losses of workers that a trainer recovered from",
    "raysgd_rejoins": "Losses after which the survivors went on",
    "raysgd_rebuilds": "Losses after which all workers were started anew",
}


class Gauges:
    """Reports the numbers of one trainer, at most once a second.

    Args:
        trainer: What tells it from other trainers in the same metrics.
    """

    def __init__(self, trainer: str) -> None:
        self._tags = {"trainer": trainer}
        self._gauges: dict[str, Any] = {}
        self._due = float("-inf")
        self._num_events = -1

    def report(self, num_workers: int, samples_per_s: float | None, history: History) -> None:
        """Reports, unless it did a moment ago and no worker was lost or gained since."""
        now = time.monotonic()
        if now < self._due and len(history.events) == self._num_events:
            return
        self._due, self._num_events = now + _PAUSE_S, len(history.events)
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        values = {
            "raysgd_workers": num_workers,
            "raysgd_samples_per_second": samples_per_s,
            "raysgd_losses": history.num_failures,
            "raysgd_rejoins": history.count("rejoined"),
            "raysgd_rebuilds": history.count("rebuilt"),
        }
        for name, value in values.items():
            if value is not None:
                self._gauge(name).set(value, self._tags)

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[name] = Gauge(name, description=_NAMES[name], tag_keys=("trainer",))
        return self._gauges[name]
