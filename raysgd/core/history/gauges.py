"""Exports the values of `trainer.status()` as Ray metrics. Without a running Ray, it exports nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from raysgd.core.history.status import TrainerStatus
from raysgd.core.numbers.timing import BINS

_PAUSE_S = 0.9  # shortest time between two exports, slightly less than the time between two polls of the workers
_NOBODY = -1


_NUMBERS: dict[str, tuple[str, Callable[[TrainerStatus], float | None]]] = {
    "raysgd_workers": ("Workers of a trainer", lambda status: len(status.workers)),
    "raysgd_workers_wanted": ("Workers that a trainer is meant to have", lambda status: status.num_wanted),
    "raysgd_spare_workers": ("Workers that wait to step in", lambda status: status.num_spares),
    "raysgd_samples_per_second": (
        "Throughput of the training call, running or last",
        lambda status: status.samples_per_s,
    ),
    "raysgd_straggler": (
        "The rank that the others wait for, or -1",
        lambda status: _NOBODY if status.straggler is None else status.straggler,
    ),
    "raysgd_samples_due": ("Samples of the epoch", lambda status: None if status.data is None else status.data.due),
    "raysgd_samples_used": (
        "Samples used in the epoch",
        lambda status: None if status.data is None else status.data.used,
    ),
    "raysgd_failures": ("Failures of workers that a trainer recovered from", lambda status: status.num_failures),
    "raysgd_continued": ("Failures after which the survivors went on", lambda status: status.num_continued),
    "raysgd_restored": ("Failures after which all workers restarted", lambda status: status.num_restored),
    "raysgd_resizes": ("Changes of the number of workers", lambda status: status.num_resizes),
    "raysgd_snapshot_timestamp_seconds": (
        "When the last snapshot reached the driver, in seconds since the epoch",
        lambda status: None if status.snapshot is None else time.time() - status.snapshot.age_s,
    ),
    "raysgd_goodput": (
        "Share of the time in training calls that was not lost to failures or spent on guarding against them",
        lambda status: None if status.ledger is None else status.ledger.goodput,
    ),
    **{
        f"raysgd_time_{name}_seconds": (
            f"Time of all ranks together: {words}",
            lambda status, name=name: None if status.ledger is None else status.ledger.total().get(name),  # type: ignore[misc]
        )
        for name, words in BINS.items()
    },
}
"""For each metric, its description and a function that reads its value from a status.

The function returns None if the value is unknown.
"""

_ZERO_AT_THE_END = ("raysgd_workers", "raysgd_spare_workers", "raysgd_samples_per_second")


class Gauges:
    """Exports the status of one trainer as Ray metrics, at most about once a second, or sooner after a worker event.

    Args:
        trainer: Tag that identifies the trainer in the metrics.
    """

    def __init__(self, trainer: str) -> None:
        self._tags = {"trainer": trainer}
        self._gauges: dict[str, Any] = {}
        self._due = float("-inf")
        self._num_events = -1

    def report(self, num_events: int, read: Callable[[], TrainerStatus]) -> None:
        """Export the metrics, unless they were exported less than a second ago and there are no new events.

        Args:
            num_events: Number of worker events, such as failures and resizes, in the trainer's history so far.
            read: Returns the trainer's current status.
        """
        now = time.monotonic()
        if (now < self._due and num_events == self._num_events) or not _is_ray_up():
            return
        self._due, self._num_events = now + _PAUSE_S, num_events
        status = read()
        for name, (_, number_in) in _NUMBERS.items():
            value = number_in(status)
            if value is not None:
                self._gauge(name).set(value, self._tags)

    def report_end(self) -> None:
        """After the trainer's shutdown, set the exported numbers of workers and the throughput to 0."""
        if _is_ray_up():
            for name in _ZERO_AT_THE_END:
                if name in self._gauges:
                    self._gauges[name].set(0, self._tags)

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[name] = Gauge(name, description=_NUMBERS[name][0], tag_keys=("trainer",))
        return self._gauges[name]


def _is_ray_up() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
