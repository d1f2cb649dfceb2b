"""Time as this process lives it, and how long those are waited for who have not answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.core.engine.gathering import LivenessCheck, OwnTime, max_silence_s, quiet_s
from raysgd.core.engine.shared.types import Unanswered
from raysgd.core.engine.worker import WorkerProcess
from tests.helpers.fakes import FakeClock


class PolledWorker:
    """A worker that is polled."""

    def submit(self, method: Any) -> None: ...


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_it_counts_as_the_clock_does_while_it_is_looked_at(clock: FakeClock) -> None:
    own_time = OwnTime(clock.monotonic)
    for _ in range(10):
        clock.sleep(0.5)
        own_time.look()
    assert own_time.look() == pytest.approx(5.0)


def test_a_long_gap_counts_as_a_second(clock: FakeClock) -> None:
    own_time = OwnTime(clock.monotonic)
    clock.sleep(60.0)
    assert own_time.look() == pytest.approx(1.0)
    clock.sleep(0.5)
    assert own_time.look() == pytest.approx(1.5)


def test_a_pause_counts_as_no_more_than_it_was_meant_to_take(clock: FakeClock) -> None:
    own_time = OwnTime(clock.monotonic)
    clock.sleep(0.7)
    assert own_time.look(0.1) == pytest.approx(0.1)


def test_work_of_its_own_counts_whole(clock: FakeClock) -> None:
    own_time = OwnTime(clock.monotonic)
    clock.sleep(60.0)
    own_time.look(float("inf"))
    assert own_time.look() == pytest.approx(60.0)


def test_time_in_which_the_driver_stood_still_is_held_against_no_one(clock: FakeClock) -> None:
    """As after Ctrl-Z: what they answered meanwhile is polled a moment later."""
    platform: Any = SimpleNamespace(now=clock.monotonic, outcome=lambda rank, call: Unanswered(rank))
    worker: Any = PolledWorker()
    liveness = LivenessCheck(platform, 5.0)
    liveness.ask([worker], WorkerProcess.describe)
    for seconds in (1.0, 600.0, 1.0, 1.0, 1.0):
        clock.sleep(seconds)
        assert liveness.poll() == ({}, {})
    clock.sleep(1.0)
    assert liveness.poll() == ({}, {worker: pytest.approx(6.0)})


@pytest.mark.parametrize(("heartbeat_s", "expected"), [(0.5, 2.0), (10.0, 2.0), (30.0, 6.0), (60.0, 12.0)])
def test_a_fifth_of_the_heartbeat_is_quiet_enough_but_never_less_than_two_seconds(
    heartbeat_s: float, expected: float
) -> None:
    assert quiet_s(heartbeat_s) == expected


@pytest.mark.parametrize(
    ("answered_after_s", "num_missing", "num_others", "expected"),
    [
        ([], 1, 1, 6.0),  # one of two lives: the other one is late by itself
        ([], 1, 0, 30.0),  # nobody lives that it could be compared with
        ([], 2, 1, 30.0),  # most are missing: it is not they who are slow
        ([], 2, 2, 6.0),
        ([0.1] * 99, 1, 0, 6.1),
        ([0.1] * 99, 100, 0, 30.0),
        ([0.1] * 99, 100, 1, 6.1),
        ([0.1] * 98 + [5.0], 1, 0, 11.0),  # answers still come in
        ([2.0] * 99, 1, 0, 20.0),  # all are slow: ten times the typical answer
        ([4.0] * 99, 1, 0, 30.0),  # but nobody gets more than a frozen process does
        ([29.0] * 99, 1, 0, 35.0),  # unless the others took as long themselves
    ],
)
def test_silence_is_seen_against_those_who_answer(
    answered_after_s: list[float], num_missing: int, num_others: int, expected: float
) -> None:
    assert max_silence_s(answered_after_s, num_missing, num_others, heartbeat_s=30.0) == pytest.approx(expected)


@pytest.mark.parametrize("num_missing", [1, 5])
def test_a_heartbeat_that_is_shorter_than_quiet_shortens_nothing(num_missing: int) -> None:
    assert max_silence_s([], num_missing, 1, heartbeat_s=0.5) == 2.0
