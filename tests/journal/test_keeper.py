"""What the driver writes to the journal of what the workers have recorded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from raysgd.callbacks import Run
from raysgd.core.history.history import History
from raysgd.journal.entries import LEG
from raysgd.journal.journal import FOLDER, LINES_FILE, Journal
from raysgd.journal.keeper import JournalKeeper
from raysgd.journal.recorder import PARTS, LineReport, News, StepBlock
from raysgd.journal.steps import NO_NORM
from raysgd.torch import TrainingOperator
from raysgd.torch.operator.settings import TorchSettings
from tests.journal.made import leg_line


def keeper_in(folder: Path) -> JournalKeeper:
    life = SimpleNamespace(
        settings=TorchSettings(TrainingOperator, {}),
        recorder=SimpleNamespace(history=History()),
        controller=SimpleNamespace(),
    )
    return JournalKeeper(Run(name="run", folder=folder), life, {"validation_freq": 1, "has_dataset": False})


def news(lost: tuple[int, int] | None = None) -> News:
    leg = LineReport(LEG, (1, 1), leg_line(0, num_workers=64))
    steps = StepBlock((1, 1), np.array([(1, 2.0, 1.0, NO_NORM), (2, 2.0, 1.0, NO_NORM)], PARTS))
    return News("last", 3, [leg, steps], lost)


def test_steps_that_were_lost_are_told_once_in_the_log_and_at_each_change_in_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = keeper_in(tmp_path)
    keeper.note_checkpoint("nothing.ckpt", 0)  # before the first leg, there is no line to add it to
    keeper.receive([news()], None, is_done=True)
    assert keeper.received == {"last": 3}
    assert not caplog.messages
    for lost in ((3, 7), (3, 7), (3, 9)):
        keeper.receive([news(lost)], None, is_done=True)
    [message] = caplog.messages
    assert "the journal of the run lacks steps from 3 to 7" in message
    lines = [*map(json.loads, (tmp_path / FOLDER / LINES_FILE).read_text().splitlines())]
    assert [line["kind"] for line in lines] == ["run", "leg", "gap", "gap"]
    gaps = [(line["first_step"], line["last_step"]) for line in lines if line["kind"] == "gap"]
    assert gaps == [(3, 7), (3, 9)]
    assert Journal(tmp_path).numbers() == [1, 2]


def test_a_journal_that_cannot_be_written_ends_and_the_workers_keep_no_reports_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("no folder")
    keeper = keeper_in(tmp_path)
    for last in (3, 4):
        keeper.receive([news()._replace(last=last)], None, is_done=False)
        keeper.note_checkpoint("a.ckpt", 1)
    [message] = caplog.messages
    assert "the journal of the run ends here: " in message
    assert keeper.received == {"last": 4}
