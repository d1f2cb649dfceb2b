from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from raysgd.train.fit.output import file_names, output_copied
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


def test_a_reporter_of_ray_tune_is_for_a_tuner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    play(tmp_path, progress_reporter=object())
    assert "`progress_reporter` shows the trials of a `Tuner`" in caplog.text


class TestCopiedOutput:
    @pytest.mark.parametrize(
        ("given", "names"),
        [
            (None, (None, None)),
            (False, (None, None)),
            (True, ("stdout", "stderr")),
            ("log.txt", ("log.txt", "log.txt")),
            (("a", "logs/b"), ("a", "logs/b")),
        ],
    )
    def test_names(self, given: Any, names: tuple[str | None, str | None]) -> None:
        assert file_names(given) == names

    @pytest.mark.parametrize("given", [7, ["a"], ("a", "b", "c"), ("a", 1), {"a": "b"}])
    def test_other_values_are_refused(self, given: Any) -> None:
        with pytest.raises(TypeError, match=r"`RunConfig\(log_to_file="):
            file_names(given)

    @pytest.mark.parametrize("given", ["/etc/passwd", "../x", ("a", "b/../../c"), ""])
    def test_names_stay_in_the_folder(self, given: Any) -> None:
        with pytest.raises(ValueError, match=r"without `\.\.`"):
            file_names(given)

    def test_get_what_is_printed_while_the_run_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = sys.stdout, sys.stderr
        with output_copied(("out.txt", "logs/err.txt"), tmp_path):
            print("to out")
            print("to err", file=sys.stderr)
        print("later")
        assert (sys.stdout, sys.stderr) == before
        assert (tmp_path / "out.txt").read_text() == "to out\n"
        assert (tmp_path / "logs" / "err.txt").read_text() == "to err\n"
        assert capsys.readouterr().out == "to out\nlater\n"

    def test_one_file_gets_both(self, tmp_path: Path) -> None:
        with output_copied(("log.txt", "log.txt"), tmp_path):
            print("to out")
            print("to err", file=sys.stderr)
        assert (tmp_path / "log.txt").read_text() == "to out\nto err\n"
