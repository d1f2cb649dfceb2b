"""What is written as JSON; the files of runs of functions are tested with those, in `tests/train`."""

from __future__ import annotations

import json
from pathlib import Path

from raysgd.writers.json_files import JsonLines, JsonList, keep_lines


def test_what_stands_at_the_end_of_each_line_also_ends_an_empty_one(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "a.jsonl", {"config": {"lr": 1}})
    file.write({"n": 1})
    file.write({})
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == [{"n": 1, "config": {"lr": 1}}, {"config": {"lr": 1}}]


def test_lines_without_an_end_of_their_own(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "a.jsonl")
    for report in ({"n": 1}, {}):
        file.write(report)
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 1}\n{}\n'


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "a.jsonl")
    file.write({"n": 1})
    with open(tmp_path / "a.jsonl", "a") as disk:  # which was full after so many bytes
        disk.write('{"n": ')
    file.write({"n": 3})
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 1}\n{"n": \n{"n": 3}\n'


def test_lines_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1, "x": 1e0}\n{"n": 2}\n[3]\n{"n": 1, "cut')
    keep_lines(path, lambda report: report["n"] == 1)
    assert path.read_text() == '{"n": 1, "x": 1e0}\n'
    keep_lines(tmp_path / "none", lambda report: True)
    assert not (tmp_path / "none").exists()


def test_a_list_is_whole_after_each_report(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    file = JsonList(path)
    for expected in ([], [{"n": 0}], [{"n": 0}, {"n": 1}]):
        assert json.loads(path.read_text()) == expected
        file.write({"n": len(expected)})


def test_a_list_is_whole_again_after_a_report_that_was_cut_off(tmp_path: Path) -> None:
    file = JsonList(tmp_path / "a.json")
    file.write(1)
    (tmp_path / "a.json").write_text('[1, {"n": ')
    file.write(3)
    assert json.loads((tmp_path / "a.json").read_text()) == [1, 3]
