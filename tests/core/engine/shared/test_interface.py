from __future__ import annotations

import logging

import pytest

from raysgd.core.engine.shared.interface import EventKind, GroupEvent, GroupHistory


def test_an_event_is_kept_with_all_that_was_said_and_the_time_of_day() -> None:
    history = GroupHistory(now=lambda: 12.5)
    history.record(GroupEvent("continued", 4, 3, 0.25, "lost rank 2", "8 of 20 samples used"))
    [event] = history.events
    assert (event.kind, event.old_size, event.new_size, event.seconds) == ("continued", 4, 3, 0.25)
    assert (event.cause, event.detail, event.at) == ("lost rank 2", "8 of 20 samples used", 12.5)


def test_events_are_counted_by_kind_and_stay_in_order() -> None:
    history = GroupHistory()
    for kind in ("started", "continued", "restored", "continued"):
        history.record(GroupEvent(kind, 2, 2, 0.0, ""))  # type: ignore[arg-type]
    assert (history.count("continued"), history.count("restored"), history.count("left")) == (2, 1, 0)
    assert [event.kind for event in history.events] == ["started", "continued", "restored", "continued"]


@pytest.mark.parametrize(
    ("kind", "level"),
    [("started", "DEBUG"), ("restarted", "INFO"), ("left", "WARNING"), ("grown", "WARNING"), ("hung", "WARNING")],
)
def test_each_event_is_one_log_line(kind: EventKind, level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="raysgd"):
        GroupHistory().record(GroupEvent(kind, 4, 3, 1.239, "lost rank 2", "2 samples are repeated"))
    [line] = caplog.records
    assert line.levelname == level
    assert line.getMessage() == f"{kind}: 4 -> 3 workers in 1.24 s: lost rank 2; 2 samples are repeated"


@pytest.mark.parametrize(
    ("kind", "new_size", "expected"),
    [
        ("continued", 4, "lost rank 2; resumed with 4 workers after 1.24 s; no sample lost"),
        ("continued", 3, "lost rank 2; resumed with 3 instead of 4 workers after 1.24 s; no sample lost"),
        ("restored", 4, "lost rank 2; restarted all workers and resumed with 4 workers after 1.24 s; no sample lost"),
    ],
)
def test_a_recovery_is_a_sentence(
    kind: EventKind, new_size: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    GroupHistory().record(GroupEvent(kind, 4, new_size, 1.239, "lost rank 2", "no sample lost"))
    [line] = caplog.records
    assert (line.levelname, line.getMessage()) == ("WARNING", expected)


def test_processes_that_were_kept_are_counted_in_the_sentence() -> None:
    history = GroupHistory()
    history.record(GroupEvent("restored", 2, 2, 1.239, "lost rank 1", num_kept=1))
    assert str(history.events[0]) == "lost rank 1; kept 1 process and resumed with 2 workers after 1.24 s"


def test_what_there_is_no_more_to_say_of_has_no_detail() -> None:
    history = GroupHistory()
    history.record(GroupEvent("left", 4, 2, 0.0, "a node is going away"))
    assert str(history.events[0]) == "left: 4 -> 2 workers in 0.00 s: a node is going away"
