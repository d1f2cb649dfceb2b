"""What a trainer tells of its last training call."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.driver import throughput
from raysgd.driver.throughput import Throughput
from raysgd.engine.shared.types import Heartbeat
from raysgd.messages.epochs import EpochAnswer


class Controller:
    """Answers a call with what each rank has measured, after so many rejoins."""

    def __init__(self, num_samples: list[int], used: int, num_continued: int = 0) -> None:
        self.history = SimpleNamespace(events=[])
        self._beats = [Heartbeat(num_samples=num) for num in num_samples]
        self._used = used
        self._num_rejoins = num_continued

    def run(self, call: Any, max_retries: int) -> list[EpochAnswer]:
        self.history.events += [SimpleNamespace(kind="continued")] * self._num_rejoins
        return [EpochAnswer(None, None, 1, heartbeat=beat, num_used=self._used) for beat in self._beats]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: Iterator[float] = iter((10.0, 12.0))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(throughput, "Gauges", lambda name: SimpleNamespace(report=lambda *numbers: None))


def after_a_call(controller: Any) -> Throughput:
    found = Throughput("mine", controller)
    assert found.samples_per_s is None
    assert len(found.run_measured(None, max_retries=0)) == 2  # type: ignore[arg-type]
    return found


def test_the_samples_of_all_ranks_count() -> None:
    assert after_a_call(Controller([30, 50], used=80)).samples_per_s == 40.0


def test_a_call_without_samples_has_no_rate() -> None:
    assert after_a_call(Controller([0, 0], used=0)).samples_per_s is None


@pytest.mark.parametrize(("used", "num_continued", "is_told"), [(100, 1, True), (80, 1, False), (100, 0, False)])
def test_samples_whose_metrics_were_lost_are_named_in_the_log(
    used: int, num_continued: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    after_a_call(Controller([30, 50], used, num_continued))
    assert ("cover 80 of 100 samples" in caplog.text) is is_told
