from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.fit.notes import make_folder, make_recorder, save


def play(tmp_path: Path, **options: Any) -> None:
    folder = make_folder(tmp_path)
    recorder = make_recorder(folder, **options)
    recorder.begin_attempt()
    recorder.record({"loss": 0.123456789, "val": {"acc": 1}}, save(folder, 0))
    recorder.fail(ValueError("x"))
    recorder.begin_attempt()
    recorder.end_run()


@pytest.mark.parametrize(
    ("verbose", "said"),
    [
        (None, []),
        (0, []),
        (1, ["running; results in", "finished after 1 reports"]),
        (2, ["running; results in", "checkpoint checkpoint_000000", "attempt 2", "finished after 1 reports"]),
        (
            3,
            [
                "running; results in",
                "report 1: loss=0.123457, val/acc=1",
                "checkpoint checkpoint_000000",
                "attempt 2",
                "finished after 1 reports",
            ],
        ),
    ],
)
def test_verbose(tmp_path: Path, capsys: pytest.CaptureFixture[str], verbose: int | None, said: list[str]) -> None:
    play(tmp_path, verbose=verbose)
    found = capsys.readouterr().out.splitlines()
    assert len(found) == len(said)
    assert all(text in line for text, line in zip(said, found, strict=True))


def test_a_reporter_of_ray_tune_and_its_files_are_for_a_tuner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    play(tmp_path, progress_reporter=object(), log_to_file=True)
    assert "`progress_reporter` shows the trials of a `Tuner`" in caplog.text
    assert "`log_to_file` is for the trials of a `Tuner`" in caplog.text
