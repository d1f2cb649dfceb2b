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


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("recovery.svg", "raysgd, with a spare worker"),
        ("startup.svg", "bare Ray actors"),
        ("steady.svg", "mlp_large (2.6 M parameters)"),
        ("sums.svg", "gloo, 64 KiB"),
    ],
)
def test_the_charts_show_the_figures_of_the_benchmarks(name: str, label: str) -> None:
    made = runpy.run_path(str(DOCS / "images" / "make_charts.py"))
    picture = (DOCS / "images" / name).read_text(encoding="utf-8")
    assert made["CHARTS"][name]() == picture, "run `python docs/images/make_charts.py`"
    assert f">{label}</text>" in picture
    ElementTree.fromstring(picture)


def test_a_chart_says_which_cell_it_cannot_read() -> None:
    made = runpy.run_path(str(DOCS / "images" / "make_charts.py"))
    assert made["Reading"].of("1.10 [1.08..1.12] s").most == 1.12
    assert made["Reading"].of("-0.5").least == -0.5
    with pytest.raises(ValueError, match="'yes' where a chart needs a number"):
        made["Reading"].of("yes")
    with pytest.raises(ValueError, match="no table whose first line begins with"):
        made["table"]("| no such column |")


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
