"""The activity of a replica, and what its second thread can tell of it while the first one works."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._numbers.meters import is_weight
from raysgd._numbers.results import CallProgress, ProgressKind, as_number
from raysgd.engine.shared.types import Heartbeat
from raysgd.worker.data.epoch_run import EpochRun
from raysgd.worker.hosted import Hosted
from raysgd.worker.ledger import Ledger
from raysgd.worker.state.copies import MidCallSnapshots

_PHASES = {"train": "training", "validation": "validating", "test": "testing", "predict": "predicting"}


@dataclass(frozen=True)
class RunningCall:
    """The call that a replica is in.

    Attributes:
        stream: Where its batches come from; counts them as `num_steps_taken`.
        began_at: Batches that the stream had given out before.
        num_steps: How many to take; None for all.
        info: What the operator is told.
        kind: What the call does.
    """

    stream: Any
    began_at: int
    num_steps: int | None
    info: Mapping[str, Any]
    kind: ProgressKind

    @property
    def phase(self) -> str:
        """The phase of the call, in a word."""
        return _PHASES[self.kind]

    def progress(self, metrics: Mapping[str, float], epoch: int) -> CallProgress:
        """Returns how far it is."""
        total, source = self.num_steps, self.stream.source
        if total is None and source is not None:
            total = source.num_steps()
        return CallProgress(
            num_steps=self.stream.num_steps_taken - self.began_at,
            total=total,
            epoch_idx=self.info.get("epoch_idx", epoch),
            num_epochs=self.info.get("num_epochs"),
            loss=metrics.get("train_loss" if self.kind == "train" else "val_loss"),
            kind=self.kind,
            metrics=metrics,
        )


class Activity:
    """Says how far a replica is. All that is asked here is asked from a second thread, too, so it only reads.

    Args:
        hosted: The operator and what belongs to it.
        ledger: Has the time of the replica.
        inside: Has the snapshots of the running call.

    Attributes:
        running: The call that the replica is in.
        run: The training call that it is in, that broke off or was held, or that was completed last.
    """

    def __init__(self, hosted: Hosted, ledger: Ledger, inside: MidCallSnapshots) -> None:
        self._hosted = hosted
        self._ledger = ledger
        self._inside = inside
        self.running: RunningCall | None = None
        self.run: EpochRun | None = None

    @property
    def unfinished(self) -> EpochRun | None:
        """The training call of which something is left to do."""
        run = self.run
        return None if run is None or run.is_finished else run

    def heartbeat(self) -> Heartbeat:
        """A sign of life."""
        run, running = self.unfinished, self.running
        if run is None:
            return self._heartbeat("between calls" if running is None else running.phase, -1)
        if running is None:
            return self._heartbeat("broken off", run.num_completed)
        num_samples = self._hosted.loop.num_samples(run)
        return self._heartbeat("training", run.num_completed, num_samples, self._inside.newest)

    def last_heartbeat(self, num_samples: int) -> Heartbeat:
        """The one that goes with the answer to a training call."""
        return self._heartbeat("between calls", -1, num_samples)

    def _heartbeat(self, phase: str, step: int, num_samples: int = 0, snapshot: int = 0) -> Heartbeat:
        epoch, loop, spent = self._hosted.feed.epoch, self._hosted.loop, self._ledger.reading()
        return Heartbeat(
            epoch,
            step,
            phase,
            num_samples,
            snapshot,
            time.monotonic(),
            loop.own_s,
            loop.ledger(),
            time=spent,
            joint_work=loop.joint_work,
        )

    def progress(self) -> CallProgress | None:
        """Returns how far the running call is."""
        running, hosted = self.running, self._hosted
        if running is None:
            return None
        reported = hosted.operator._raysgd.latest_metrics
        latest = {name: as_number(value) for name, value in reported.items() if not is_weight(name)}
        metrics = {name: number for name, number in latest.items() if number is not None}
        return running.progress(metrics, max(0, hosted.feed.epoch - 1))
