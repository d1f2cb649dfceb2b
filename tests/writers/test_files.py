"""Files of metrics; how tables grow is tested with the runs of functions, in `tests/train/fit/test_output.py`."""

from __future__ import annotations

import json
from pathlib import Path

from raysgd.writers.files import CsvTable, JsonLines, JsonList
from raysgd.writers.sink import FileSink, RunInFolder


def test_what_stands_at_the_end_of_each_line_also_ends_an_empty_one(tmp_path: Path) -> None:
    file = opened(JsonLines("a.jsonl", {"config": {"lr": 1}}), tmp_path)
    file.write({"n": 1}, 1)
    file.write({}, 1)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == [{"n": 1, "config": {"lr": 1}}, {"config": {"lr": 1}}]


def test_lines_without_an_end_of_their_own(tmp_path: Path) -> None:
    file = opened(JsonLines("a.jsonl"), tmp_path)
    for report in ({"n": 1}, {}):
        file.write(report, 1)
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 1}\n{}\n'


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    file = opened(JsonLines("a.jsonl"), tmp_path)
    file.write({"n": 1}, 1)
    with open(tmp_path / "a.jsonl", "a") as disk:  # which was full after so many bytes
        disk.write('{"n": ')
    file.write({"n": 3}, 1)
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 1}\n{"n": \n{"n": 3}\n'


def test_lines_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['{"epoch": 1, "x": 1e0}', '{"epoch": 2}', "[3]", "[" * 100_000, '{"training_iteration": 1}', '{"n": 1}']
    path.write_text("\n".join([*lines, '{"epoch": 1, "cut']))
    JsonLines(path).open(RunInFolder(tmp_path), first_step=1)
    assert path.read_text() == '{"epoch": 1, "x": 1e0}\n{"training_iteration": 1}\n'


def opened(file: FileSink, folder: Path) -> FileSink:
    file.open(RunInFolder(folder))
    return file


def test_a_list_is_whole_after_each_report(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1, 2]")
    file = opened(JsonList(path), tmp_path)
    for expected in ([], [{"n": 0}], [{"n": 0}, {"n": 1}]):
        assert json.loads(path.read_text()) == expected
        file.write({"n": len(expected)}, 1)


def test_a_list_is_whole_again_after_a_report_that_was_cut_off(tmp_path: Path) -> None:
    file = opened(JsonList("a.json"), tmp_path)
    file.write(1, 1)
    (tmp_path / "a.json").write_text('[1, {"n": ')
    file.write(3, 1)
    assert json.loads((tmp_path / "a.json").read_text()) == [1, 3]


def test_rows_that_are_kept_stay_and_the_table_goes_on_behind_them(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('epoch,text\n1,"a, b"\n2,c\n3,d\n')
    table = CsvTable("a.csv")
    table.open(RunInFolder(tmp_path), first_step=2)
    table.write({"epoch": 3, "text": "e"}, 3)
    assert path.read_text() == 'epoch,text\n1,"a, b"\n2,c\n3,e\n'


def test_rows_that_say_nothing_of_their_epoch_go(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("epoch,text\n1,a\n,b\nx,c\n")
    CsvTable(path).open(RunInFolder(tmp_path), first_step=5)
    assert path.read_text() == "epoch,text\n1,a\n"


def test_all_rows_stay_where_the_first_step_is_not_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n2\n")
    CsvTable("a.csv").open(RunInFolder(tmp_path))
    assert (tmp_path / "a.csv").read_text() == "n\n1\n2\n"
