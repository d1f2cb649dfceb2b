"""The speed of a trainer, and what its last training call measured: for `status`, for Ray's metrics, for the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
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

    def run(self, call: Call, max_retries: int) -> list[EpochAnswer]:
        """Runs a training call, and notes how many samples a second it trained."""
        history = self._controller.history
        self.accounts.begin_call()
        began, num_continued = time.perf_counter(), history.count("continued")
        try:
            answers: list[EpochAnswer] = self._controller.run(call, max_retries=max_retries)
            self._heartbeats = {rank: each.heartbeat for rank, each in enumerate(answers) if each.heartbeat is not None}
            self._note(self._heartbeats)
        finally:
            self.accounts.end_call()
        num_samples = sum(heartbeat.num_samples for heartbeat in self._heartbeats.values())
        num_samples += int(sum(each.num_inherited for each in answers))
        self.samples_per_s = num_samples / (time.perf_counter() - began) or None
        self.report()
        if history.count("continued") > num_continued:
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
        told = {worker.rank: worker.heartbeat for worker in status.workers if worker.heartbeat is not None}
        self._note(told)
        self.accounts.warn()
        return replace(status, ledger=self.accounts.ledger(len(status.workers)))

    def _note(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        self.accounts.note({rank: heartbeat.time for rank, heartbeat in heartbeats.items()})

    def end(self) -> None:
        """Takes the trainer out of Ray's metrics."""
        self.accounts.end()
        self._gauges.end()


def _tell_what_is_measured(num_samples: int, num_used: int) -> None:
    """After a failure inside the call: says why `num_samples` of the result is a part of what was trained on."""
    if 0 < num_samples < num_used:  # none: a loop of the user counts none
        logger.warning(
            "the metrics of this call cover %s of %s samples: what lost workers had not told the others of their "
            "metrics was lost with them. The training did use their samples",
            num_samples,
            num_used,
        )
