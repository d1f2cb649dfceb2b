"""Workers that freeze while they are made ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from raysgd.engine.newcomers import Newcomers
from raysgd.engine.types import Outcome, WorkerInfo
from raysgd.engine.worker import RemoteWorker
from tests.fakes import FakeClock


@dataclass(eq=False)
class Process:
    """A worker whose process is made at some time, and may be stopped at another."""

    pid: int
    is_there: bool = True
    is_known: bool = False
    is_stopped: bool = False
    calls: list[str] = field(default_factory=list)

    def submit(self, method: str) -> Process:
        self.calls.append(method)
        return self

    def kill(self) -> None:
        self.calls.append("kill")


class Nursery:
    """Newcomers that are looked at ten times a second."""

    def __init__(self, *processes: Process, heartbeat_s: float = 12.0) -> None:
        self.clock = FakeClock()
        self.ended: list[int] = []
        self.newcomers = Newcomers(
            heartbeat_s, self._poll, lambda info: self.ended.append(info.pid), self._find, self.clock.monotonic
        )
        for process in processes:
            self.newcomers.add(cast(RemoteWorker, process))

    def _poll(self, rank: int, process: Any) -> Outcome:
        if process.is_stopped or not process.is_there:
            return Outcome(rank, answered=False)
        return Outcome(rank, WorkerInfo("node", "10.0.0.1", process.pid))

    def _find(self, worker: Any) -> WorkerInfo | None:
        return WorkerInfo("node", "10.0.0.1", worker.pid) if worker.is_known else None

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.sleep(0.1)
            self.newcomers.poll()


def test_whoever_freezes_is_ended_after_the_time_for_a_heartbeat(caplog: pytest.LogCaptureFixture) -> None:
    frozen, other = Process(1), Process(2)
    nursery = Nursery(frozen, other)
    nursery.pass_time(1)
    frozen.is_stopped = True
    nursery.pass_time(11.5)
    assert nursery.ended == []
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        nursery.pass_time(2)
    assert nursery.ended == [1]
    assert "kill" in frozen.calls, "so that Ray does not wait for it either"
    assert "kill" not in other.calls
    assert "process 1 on node 10.0.0.1" in caplog.text
    nursery.pass_time(60)
    assert nursery.ended == [1], "once"


def test_whoever_takes_long_but_answers_is_left_alone() -> None:
    slow = Process(1)
    nursery = Nursery(slow)
    nursery.pass_time(300)
    assert nursery.ended == []
    assert len(slow.calls) == pytest.approx(300, abs=30), "about once a second, and never twice at a time"


def test_a_process_that_is_not_there_yet_is_not_frozen() -> None:
    late = Process(1, is_there=False)
    nursery = Nursery(late)
    nursery.pass_time(120)
    assert nursery.ended == []
    late.is_there = True
    nursery.pass_time(1)
    late.is_stopped = True
    nursery.pass_time(14)
    assert nursery.ended == [1]


def test_a_process_that_freezes_before_it_ever_answers_is_found_and_ended() -> None:
    frozen = Process(1, is_there=False)
    nursery = Nursery(frozen)
    nursery.pass_time(60)
    frozen.is_known = True
    nursery.pass_time(12)
    assert nursery.ended == [], "it was found a moment ago, and may still answer"
    nursery.pass_time(16)
    assert nursery.ended == [1]


def test_a_short_heartbeat_leaves_time_to_load_libraries() -> None:
    loading = Process(1)
    nursery = Nursery(loading, heartbeat_s=0.5)
    nursery.pass_time(1)
    loading.is_stopped = True
    nursery.pass_time(9)
    assert nursery.ended == []
    nursery.pass_time(3)
    assert nursery.ended == [1]


def test_whoever_is_ready_is_not_looked_after_any_more() -> None:
    ready = Process(1)
    nursery = Nursery(ready)
    nursery.pass_time(1)
    nursery.newcomers.remove(cast(RemoteWorker, ready))
    ready.is_stopped = True
    nursery.pass_time(60)
    assert nursery.ended == []


def test_time_in_which_nobody_looked_is_held_against_nobody() -> None:
    process = Process(1)
    nursery = Nursery(process)
    nursery.pass_time(1)
    process.is_stopped = True
    nursery.pass_time(3)
    nursery.clock.sleep(600)
    nursery.newcomers.poll()
    assert nursery.ended == []
    process.is_stopped = False
    nursery.pass_time(60)
    assert nursery.ended == []
