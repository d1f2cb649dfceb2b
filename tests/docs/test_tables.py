"""The tables and charts of the pages are made from what they are about."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_names_of_the_migration_page_are_those_of_the_table() -> None:
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    assert made["with_tables"](page) == page, "run `python docs/make_tables.py`"
    assert page.count("| `ray.") > 60


def test_the_chart_of_recovery_shows_the_figures_of_the_benchmark() -> None:
    made = runpy.run_path(str(DOCS / "images" / "make_recovery_chart.py"))
    picture = (DOCS / "images" / "recovery.svg").read_text(encoding="utf-8")
    assert made["chart"]() == picture, "run `python docs/images/make_recovery_chart.py`"
    assert len(made["figures"]()) == 5


@pytest.mark.parametrize("name", ["parts.svg", "loss.svg", "pass.svg"])
def test_the_pictures_of_concepts_are_those_of_their_script(name: str) -> None:
    made = runpy.run_path(str(DOCS / "images" / "make_concepts.py"))
    picture = (DOCS / "images" / name).read_text(encoding="utf-8")
    assert made["PICTURES"][name]() == picture, "run `python docs/images/make_concepts.py`"
    ElementTree.fromstring(picture)


def test_every_sample_of_the_picture_is_used_once() -> None:
    made = runpy.run_path(str(DOCS / "images" / "make_concepts.py"))
    first, lost, *others = made["divided"]()
    assert sorted(sample for step in (first, *others) for batch in step for sample in batch) == list(range(22))
    assert len(lost) == 3
