"""Tables; how they grow is tested with the runs of functions, in `tests/train/fit/test_trial_files.py`."""

from __future__ import annotations

from pathlib import Path

from raysgd.writers.csv_table import CsvTable
from raysgd.writers.sink import RunInFolder


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
