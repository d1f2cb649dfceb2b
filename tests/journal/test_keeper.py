"""How the driver fetches what the workers have recorded: from those that answer, and without a long wait for others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from raysgd.journal.entries import LEG
from raysgd.journal.journal import FOLDER, LINES_FILE, Journal
from raysgd.journal.keeper import JournalKeeper
from raysgd.journal.recorder import PARTS, LineReport, News, StepBlock
from raysgd.journal.steps import NO_NORM
from tests.journal.made import HEADER, leg_line


class Clock:
    """A clock that only waits move."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Group:
    """Workers of which only the last one answers. Also the controller of this group."""

    def __init__(self, size: int, clock: Clock) -> None:
        self.size, self.clock = size, clock
        self.lost: tuple[int, int] | None = None

    @property
    def group(self) -> Group:
        return self

    def __len__(self) -> int:
        return self.size

    def fetch(self, rank: int, function: Any, received: Any) -> Any:
        def result(timeout_s: float) -> Any:
            if rank == self.size - 1:
                leg = LineReport(LEG, (1, 1), leg_line(0, num_workers=self.size))
                steps = StepBlock((1, 1), np.array([(1, 2.0, 1.0, NO_NORM), (2, 2.0, 1.0, NO_NORM)], PARTS))
                return News("last", 3, [leg, steps], self.lost)
            self.clock.now += timeout_s
            raise TimeoutError

        return SimpleNamespace(result=result)


def test_the_driver_waits_for_all_silent_workers_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in ("raysgd.journal.keeper", "raysgd.core.engine.transfers"):
        monkeypatch.setattr(f"{module}.time", clock)
    keeper = JournalKeeper(lambda: tmp_path, cast("Any", Group(64, clock)), lambda: HEADER)
    keeper(is_done=False)
    assert clock.now == pytest.approx(101.0)
    assert [Journal(tmp_path).check_step(step).loss for step in (1, 2)] == [2.0, 2.0]


def test_steps_that_were_lost_are_told_once_in_the_log_and_at_each_change_in_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(1, Clock())
    keeper = JournalKeeper(lambda: tmp_path, cast("Any", group), lambda: HEADER)
    keeper.fetch()
    assert not caplog.messages
    for group.lost in ((3, 7), (3, 7), (3, 9)):
        keeper.fetch()
    [message] = caplog.messages
    assert "the journal of the run lacks steps from 3 to 7" in message
    lines = map(json.loads, (tmp_path / FOLDER / LINES_FILE).read_text().splitlines())
    gaps = [(line["first_step"], line["last_step"]) for line in lines if line["kind"] == "gap"]
    assert gaps == [(3, 7), (3, 9)]
    assert Journal(tmp_path).numbers() == [1, 2]
