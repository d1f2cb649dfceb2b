"""What is reported to Ray's metrics, and how often."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.engine.shared.interface import GroupEvent, GroupHistory
from raysgd.core.engine.shared.types import Heartbeat, SamplesUsed, WorkerInfo
from raysgd.core.history.status import Gauges, TrainerStatus
from tests.helpers.fakes import status_of


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What was set, by name, in a Ray that is nothing but its metrics."""
    values: dict[str, list[float]] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description
            assert tag_keys == ("trainer",)
            self.name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tags == {"trainer": "mine"}
            values.setdefault(self.name, []).append(value)

    ray: Any = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.metrics", SimpleNamespace(Gauge=Gauge))
    return values


def status(samples_per_s: float | None = 99.5, *events: Any, ledger: SamplesUsed | None = None) -> TrainerStatus:
    history = GroupHistory()
    for event in events:
        history.record(GroupEvent(*event))
    return status_of(
        infos=[WorkerInfo("a", "10.0.0.1", 11), WorkerInfo("b", "10.0.0.2", 12)],
        heartbeats={0: Heartbeat(own_s=1.0, data=ledger), 1: Heartbeat(own_s=2.0, data=ledger)},
        samples_per_s=samples_per_s,
        history=history,
    )


def test_the_numbers_are_those_of_the_status(reported: dict[str, list[float]]) -> None:
    found = status(99.5, ("continued", 3, 2, 0.1, "lost rank 1"), ledger=SamplesUsed(0, 100, 60))
    Gauges("mine").report(1, lambda: found)
    assert reported == {
        "raysgd_workers": [2],
        "raysgd_workers_wanted": [3],
        "raysgd_spare_workers": [1],
        "raysgd_samples_per_second": [99.5],
        "raysgd_straggler": [1],
        "raysgd_samples_due": [100],
        "raysgd_samples_used": [60],
        "raysgd_failures": [1],
        "raysgd_continued": [1],
        "raysgd_restored": [0],
        "raysgd_resizes": [1],
    }


def test_a_second_report_in_the_same_moment_is_left_out_unless_something_happened(
    reported: dict[str, list[float]],
) -> None:
    gauges = Gauges("mine")
    gauges.report(0, lambda: status(1.0))
    gauges.report(0, lambda: pytest.fail("read in vain"))
    gauges.report(1, lambda: status(3.0))
    assert reported["raysgd_samples_per_second"] == [1.0, 3.0]


def test_what_is_not_known_is_not_reported(reported: dict[str, list[float]]) -> None:
    Gauges("mine").report(0, lambda: status(None))
    unknown = {"raysgd_samples_per_second", "raysgd_samples_due", "raysgd_snapshot_timestamp_seconds"}
    assert not unknown & set(reported)


def test_at_the_end_there_is_nobody_any_more(reported: dict[str, list[float]]) -> None:
    gauges = Gauges("mine")
    gauges.report_end()
    assert reported == {}, "nobody was told of a trainer"
    gauges.report(0, lambda: status(7.0))
    gauges.report_end()
    for name in ("raysgd_workers", "raysgd_spare_workers", "raysgd_samples_per_second"):
        assert reported[name][-1] == 0
    assert reported["raysgd_failures"] == [0], "what has happened, has happened"


def test_without_ray_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    gauges = Gauges("mine")
    gauges.report(0, lambda: pytest.fail("read in vain"))
    gauges.report_end()
