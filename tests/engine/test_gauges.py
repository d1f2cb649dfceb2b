"""What is reported to Ray's metrics, and how often."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.engine.gauges import Gauges
from raysgd.engine.history import History


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


def test_the_numbers_are_reported_under_their_names(reported: dict[str, list[float]]) -> None:
    history = History()
    history.record("rejoined", 2, 2, 0.1, "lost rank 1")
    Gauges("mine").report(2, 99.5, history)
    assert reported == {
        "raysgd_workers": [2],
        "raysgd_samples_per_second": [99.5],
        "raysgd_losses": [1],
        "raysgd_rejoins": [1],
        "raysgd_rebuilds": [0],
    }


def test_a_second_report_in_the_same_moment_is_left_out_unless_something_happened(
    reported: dict[str, list[float]],
) -> None:
    gauges, history = Gauges("mine"), History()
    gauges.report(2, 1.0, history)
    gauges.report(2, 2.0, history)
    assert reported["raysgd_samples_per_second"] == [1.0]
    history.record("rebuilt", 2, 1, 1.0, "lost rank 0")
    gauges.report(1, 3.0, history)
    assert reported["raysgd_samples_per_second"] == [1.0, 3.0]
    assert reported["raysgd_workers"] == [2, 1]


def test_what_was_not_measured_is_not_reported(reported: dict[str, list[float]]) -> None:
    Gauges("mine").report(1, None, History())
    assert "raysgd_samples_per_second" not in reported


def test_without_ray_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    Gauges("mine").report(1, 1.0, History())
