"""Tables; how they grow is tested with the runs of functions, in `tests/train/fit/test_writers.py`."""

from __future__ import annotations

from pathlib import Path

from raysgd.writers.csv_table import CsvTable, keep_rows


def test_rows_that_are_kept_stay_and_the_table_goes_on_behind_them(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('epoch,text\n1,"a, b"\n2,c\n3,d\n')
    keep_rows(path, lambda row: int(row["epoch"]) < 3)
    table = CsvTable(path)
    table.write({"epoch": 3, "text": "e"})
    assert path.read_text() == 'epoch,text\n1,"a, b"\n2,c\n3,e\n'


def test_a_table_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    keep_rows(tmp_path / "a.csv", lambda row: True)
    assert not (tmp_path / "a.csv").exists()
