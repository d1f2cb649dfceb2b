"""`make test` shows with real processes what README guarantees: each guarantee has tests with the mark `promise`."""

from __future__ import annotations

import re

from tests.repository.test_layout import ROOT

MARK = re.compile(r'pytest\.mark\.promise\("([^"]+)"\)')


def promised() -> set[str]:
    """Return the promises that tests are marked with."""
    paths = ROOT.joinpath("tests").rglob("test_*.py")
    return {name for path in paths for name in MARK.findall(path.read_text(encoding="utf-8"))}


def test_each_guarantee_of_the_readme_has_a_test() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it guarantees\n")[2]
    guarantees = re.findall(r"^- \*\*(.+?)\.\*\*", section.partition("\n## ")[0], flags=re.MULTILINE)
    assert len(guarantees) > 5
    assert sorted(set(guarantees) - promised()) == []
