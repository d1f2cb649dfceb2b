"""The speed of a trainer, and what its last training call measured: for `status`, for Ray's metrics, for the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace

from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import Heartbeat
from raysgd.engine.status import TrainerStatus
from raysgd.history.accounts import Accounts
from raysgd.history.gauges import Gauges
from raysgd.messages.epochs import EpochAnswer

logger = logging.getLogger(__name__)


class Throughput:
    """Runs training calls, and keeps what there is to tell of the last one.

    Args:
        name: Names the trainer to Ray's metrics.
        controller: Has the workers.
        used: Options that no one needs to be advised to use.

    Attributes:
        samples_per_s: Of the last training call; None before the first.
    """

    def __init__(self, name: str, controller: ElasticController, used: Collection[str] = ()) -> None:
        self._controller = controller
        self._gauges = Gauges(name)
        self._heartbeats: dict[int, Heartbeat] = {}
        self.samples_per_s: float | None = None
        self.accounts = Accounts(used=used)

    def run_measured(self, call: Call, max_retries: int) -> list[EpochAnswer]:
        """Runs a training call, and notes how many samples a second it trained."""
        events = self._controller.history.events
        began, num_events = time.perf_counter(), len(events)
        self.accounts.begin_call()
        try:
            answers: list[EpochAnswer] = self._controller.run(call, max_retries=max_retries)
            self._heartbeats = {rank: each.heartbeat for rank, each in enumerate(answers) if each.heartbeat is not None}
            self.accounts.note_times(self._heartbeats)
        finally:
            self.accounts.end_call()
        num_samples = 0
        for answer in answers:
            num_samples += int(answer.num_inherited)
            num_samples += 0 if answer.heartbeat is None else answer.heartbeat.num_samples
        self.samples_per_s = num_samples / (time.perf_counter() - began) or None
        self.report()
        if any(event.kind == "continued" for event in events[num_events:]):
            _tell_what_is_measured(num_samples, max(each.num_used for each in answers))
        return answers

    def report(self) -> None:
        """Gives Ray's metrics the numbers of now."""
        self._gauges.report(len(self._controller.history.events), self._glance)

    def _glance(self) -> TrainerStatus:
        found = self._controller.glance(self._heartbeats, self.samples_per_s)
        return self.with_ledger(found)

    def with_ledger(self, status: TrainerStatus) -> TrainerStatus:
        """A status, and where the time went."""
        self.accounts.note_times({each.rank: each.heartbeat for each in status.workers if each.heartbeat is not None})
        self.accounts.warn()
        return replace(status, ledger=self.accounts.ledger(len(status.workers)))

    def stop_reporting(self) -> None:
        """Takes the trainer out of Ray's metrics."""
        self.accounts.note_end()
        self._gauges.report_end()


def _tell_what_is_measured(num_samples: int, num_used: int) -> None:
    """After a failure inside the call: says why `num_samples` of the result is a part of what was trained on."""
    if 0 < num_samples < num_used:  # none: a loop of the user counts none
        logger.warning(
            "the metrics of this call cover %s of %s samples: what lost workers had not told the others of their "
            "metrics was lost with them. The training did use their samples",
            num_samples,
            num_used,
        )
