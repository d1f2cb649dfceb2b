"""The tables of the pages are those that raysgd goes by."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_names_of_the_migration_page_are_those_of_the_table() -> None:
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    assert made["with_tables"](page) == page, "run `python docs/make_tables.py`"
    assert page.count("| `ray.") > 60
