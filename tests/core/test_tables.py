"""Tables in `.ini` files: each has a module that reads it, and rows that say something."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from raysgd.core.tables import read_table

PACKAGE = Path(__file__).resolve().parents[2] / "raysgd"
TABLES = sorted(PACKAGE.rglob("*.ini"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_of_the_package_is_read_by_its_module_and_has_no_empty_row(path: Path) -> None:
    module = path.with_suffix(".py")
    assert "read_table(__file__)" in module.read_text(encoding="utf-8")
    sections = read_table(str(module))
    assert sections
    assert [title for title, rows in sections.items() if not rows] == []
    texts = [text for rows in sections.values() for row in rows.items() for text in row]
    assert [text for text in texts if text != " ".join(text.split()) or not text] == []
    assert path.read_text(encoding="utf-8").isascii()


def write(tmp_path: Path, text: str) -> str:
    (tmp_path / "table.ini").write_text(text, encoding="utf-8")
    return str(tmp_path / "table.py")


def test_a_row_keeps_its_order_case_and_signs_and_goes_on_in_indented_lines(tmp_path: Path) -> None:
    text = '# Above.\n[One: two]\nB c = `f(a=1)`: "50 %%"; $x\n    goes on\nA = 1\n'
    table = read_table(write(tmp_path, text))
    assert table == {"One: two": {"B c": '`f(a=1)`: "50 %%"; $x goes on', "A": "1"}}
    assert list(table["One: two"]) == ["B c", "A"]


@pytest.mark.parametrize("text", ["[a]\nb = 1\nb = 2\n", "[a]\nb = 1\n[a]\nc = 1\n", "[a]\nb\n", "b = 1\n"])
def test_a_row_that_is_there_twice_or_says_nothing_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(configparser.Error):
        read_table(write(tmp_path, text))
