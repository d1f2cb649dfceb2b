from __future__ import annotations

import logging
from typing import Any

import pytest

from raysgd.engine.shared.snapshot_pace import SnapshotPace, SnapshotRule
from tests.helpers.fakes import FakeClock


@pytest.mark.parametrize(
    ("every_s", "copy_s", "since_s", "replay_s", "num_calls", "is_due"),
    [
        ("auto", 0.0005, 0.02, 0.0, 1, False),
        ("auto", 0.1, 4.9, 4.9, 1, False),
        ("auto", 0.1, 5.1, 5.1, 1, True),  # 2 %
        ("auto", 2.0, 31.0, 29.0, 3, False),
        ("auto", 2.0, 31.0, 30.5, 3, True),  # too much to repeat
        ("auto", 2.0, 10.0, 9.0, 10_001, True),  # too many calls to remember
        (60, 0.0, 59.0, 59.0, 1, False),
        (60, 9.0, 60.0, 1.0, 1, True),
        (0, 9.0, 0.0, 0.0, 1, True),
        (None, 0.0, 1e6, 1e6, 10**6, False),
    ],
)
def test_a_snapshot_is_due_when_it_is_cheap_or_too_much_would_be_repeated(
    every_s: Any, copy_s: float, since_s: float, replay_s: float, num_calls: int, is_due: bool
) -> None:
    assert SnapshotRule(every_s).is_due(copy_s, since_s, replay_s, num_calls) is is_due


@pytest.mark.parametrize(
    ("every_s", "copy_s", "words"),
    [
        ("auto", None, "after each call"),
        ("auto", 0.0004, "every 0.02 s, because a copy takes 0.0004 s"),
        ("auto", 0.1, "every 5 s, because a copy takes 0.1 s"),
        ("auto", 5.0, "every 30 s, because a copy takes 5 s"),
        (0, 1.0, "after each call"),
        (60, 1.0, "every 60 s"),
        (None, None, "switched off"),
    ],
)
def test_the_pace_is_told(every_s: Any, copy_s: float | None, words: str) -> None:
    assert SnapshotRule(every_s).words(copy_s) == words


def test_a_call_is_expected_to_take_as_long_as_the_last_one_of_its_function() -> None:
    clock = FakeClock()
    pace = SnapshotPace(SnapshotRule("auto"), clock.monotonic)
    assert pace.is_due("train", 0, 0), "nothing is known of it"
    pace.note_copy(0.1)
    assert pace.is_due("train", 0, 0)
    pace.note_call("train", 1.0)
    assert not pace.is_due("train", 0, 0)
    assert pace.is_due("validate", 0, 0)
    clock.now_s += 3.5
    assert not pace.is_due("train", 3, 3)
    clock.now_s += 1.0
    assert pace.is_due("train", 4, 4)
    pace.note_copy(0.1)
    assert not pace.is_due("train", 0, 0)


def test_a_heartbeat_shorter_than_a_copy_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    pace = SnapshotPace(SnapshotRule(), FakeClock().monotonic, heartbeat_s=2)
    with caplog.at_level(logging.WARNING):
        pace.note_copy(1.9)
        assert not caplog.messages
        pace.note_copy(2.5)
        pace.note_copy(2.6)
    assert len(caplog.messages) == 1
    assert "`heartbeat_s=2` is shorter than a copy of the state, which took 2.5 s" in caplog.text
    assert "`heartbeat_s=8`" in caplog.text
