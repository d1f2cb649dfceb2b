"""How fast a trainer is, and what its last training call measured: for `status`, for Ray's metrics, for the log."""

from __future__ import annotations

import logging
import time

from raysgd.engine.call import Call
from raysgd.engine.controller import ElasticController
from raysgd.engine.types import Heartbeat
from raysgd.replicas.epochs import EpochAnswer
from raysgd.replicas.gauges import Gauges

logger = logging.getLogger(__name__)


class Throughput:
    """Runs training calls, and keeps what there is to tell of the last one.

    Attributes:
        samples_per_s: Of the last training call; None before the first.
    """

    def __init__(self, name: str, controller: ElasticController) -> None:
        self._controller = controller
        self._gauges = Gauges(name)
        self._heartbeats: dict[int, Heartbeat] = {}
        self.samples_per_s: float | None = None

    def run(self, call: Call, max_retries: int) -> list[EpochAnswer]:
        """Runs a training call."""
        history = self._controller.history
        began, num_rejoins = time.perf_counter(), history.count("rejoined")
        answers: list[EpochAnswer] = self._controller.run(call, max_retries=max_retries)
        self._heartbeats = {rank: each.heartbeat for rank, each in enumerate(answers) if each.heartbeat is not None}
        num_samples = sum(heartbeat.num_samples for heartbeat in self._heartbeats.values())
        self.samples_per_s = num_samples / (time.perf_counter() - began) or None
        self.report()
        if history.count("rejoined") > num_rejoins:
            self._tell_what_is_measured(num_samples)
        return answers

    def _tell_what_is_measured(self, num_samples: int) -> None:
        """After a loss inside the call: says why `num_samples` of the result is a part of what was trained on."""
        ledgers = [heartbeat.data for heartbeat in self._heartbeats.values() if heartbeat.data is not None]
        if ledgers and num_samples < ledgers[0].used:
            logger.warning(
                "the metrics of this call cover only %s samples: those of the lost worker were lost with it. The "
                "training did use its samples",
                num_samples,
            )

    def report(self) -> None:
        """Gives Ray's metrics the numbers of now."""
        controller = self._controller
        self._gauges.report(
            len(controller.history.events), lambda: controller.glance(self._heartbeats, self.samples_per_s)
        )

    def end(self) -> None:
        """Takes the trainer out of Ray's metrics."""
        self._gauges.end()
