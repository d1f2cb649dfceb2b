"""`make test` shows each promise of the README with real processes, and CONTRIBUTING.md says by which test."""

from __future__ import annotations

import re

from tests.house.test_layout import ROOT

MARK = re.compile(r'pytest\.mark\.promise\("([^"]+)"\)')
ROW = re.compile(r"^\| (.+?) \| `(.+?)` \|$", flags=re.MULTILINE)


def promised() -> set[tuple[str, str]]:
    """The marks in the tests: each row with the file and the name of its test."""
    found = set()
    for path in sorted(ROOT.joinpath("tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for mark in MARK.finditer(text):
            name = re.compile(r"def (test_\w+)").search(text, mark.end())
            assert name is not None, path
            found.add((mark[1], f"{path.relative_to(ROOT)}::{name[1]}"))
    return found


def table() -> list[tuple[str, str]]:
    """The rows in CONTRIBUTING.md."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("| promise | test |")[2]
    return ROW.findall(section.partition("\n\n")[0])


def test_the_table_of_promises_names_the_tests_that_are_marked() -> None:
    assert set(table()) == promised()
    assert len(table()) == len(promised()), "a row stands twice"


def test_each_guarantee_of_the_readme_has_a_test() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it guarantees\n")[2]
    guarantees = re.findall(r"^- \*\*(.+?)\.\*\*", section.partition("\n## ")[0], flags=re.MULTILINE)
    assert len(guarantees) > 5
    assert [each for each in guarantees if each not in {row for row, _ in table()}] == []
