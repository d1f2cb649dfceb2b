"""The tables and charts of the pages are made from what they are about."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from raysgd.compat.paths import RAY_TRAIN

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_names_of_the_page_of_old_names_are_those_of_the_table() -> None:
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    page = (DOCS / "reference" / "old-names.md").read_text(encoding="utf-8")
    assert made["with_tables"](page) == page, "run `python docs/make_tables.py`"
    assert page.count("| `ray.") > 60


def test_the_table_of_options_has_the_defaults_of_both_trainers() -> None:
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    page = (DOCS / "reference" / "trainers.md").read_text(encoding="utf-8")
    assert made["with_options"](page) == page, "run `python docs/make_tables.py`"
    assert '| `use_gpu` | `"auto"` | `False` |' in page


def test_what_the_page_of_old_names_calls_gone_from_ray_is_gone() -> None:
    ray = pytest.importorskip("ray")
    if not ray.__version__.startswith(RAY_TRAIN):
        pytest.skip(f"the table is about Ray {RAY_TRAIN}, and this is {ray.__version__}")
    page = (DOCS / "reference" / "old-names.md").read_text(encoding="utf-8")
    table = page.partition("| gone from Ray |")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines() for name in re.findall(r"`(ray\.[\w.]+)`", row.split("|")[1:2][0])]
    assert len(names) > 20
    assert [name for name in names if is_there(name)] == []
    assert is_there("ray.data.Dataset.map_batches"), "the question can be answered with yes"


def is_there(name: str) -> bool:
    """Return whether the installed Ray has a module, or what it holds."""
    module, attributes = name, list[str]()
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ImportError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        found = getattr(found, attribute, None)
    return found is not None


def test_the_first_page_of_the_site_is_made_from_the_readme() -> None:
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    assert (DOCS / "index.md").read_text(encoding="utf-8") == made["index"](), "run `python docs/make_tables.py`"


def test_the_picture_of_a_recovery_is_drawn_from_its_table() -> None:
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert made["with_states"](page) == page, "run `python docs/make_tables.py`"
    assert "    TearingDown --> " in page


def test_the_page_of_claims_is_made_from_their_table() -> None:
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    page = (DOCS / "reference" / "claims.md").read_text(encoding="utf-8")
    assert page == made["claims_page"](), "run `python docs/make_tables.py`"
    assert page.count("| `pytest ") > 20


CELL = re.compile(
    r"\]\((?:\.\./(?:tests|examples)/|[\w-]+\.md)[^)]*\)|^as for |^not tested|^nothing$|^without|^at |^a copy|^yes$"
)


def test_each_cell_of_the_table_of_programs_shows_something_or_says_that_nothing_does() -> None:
    """That the files and tests that it links exist is in `tests/docs/test_docs.py`."""
    page = (DOCS / "kinds.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines() if row.startswith("| ")]
    assert len(rows) == 14
    assert all("(../tests/" in row[1] for row in rows[1:]), "what a death costs is shown by a test"
    assert [cell for row in rows[1:] for cell in row[1:] if not CELL.search(cell)] == []


def test_the_tables_of_goodput_and_of_the_record_show_what_was_measured() -> None:
    made = runpy.run_path(str(DOCS / "make_tables.py"))
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert made["with_measured"](page) == page, "run `python docs/make_tables.py`"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("goodput.svg", "raysgd, new process, 15 s"),
        ("recovery.svg", "raysgd, 2 workers and a spare"),
        ("startup.svg", "bare Ray actors"),
        ("steady.svg", "mlp_large (2.6 M parameters)"),
    ],
)
def test_the_charts_show_the_figures_of_the_benchmarks(name: str, label: str) -> None:
    made = runpy.run_path(str(DOCS / "images" / "make_charts.py"))
    picture = (DOCS / "images" / name).read_text(encoding="utf-8")
    assert made["CHARTS"][name]() == picture, "run `python docs/images/make_charts.py`"
    assert f">{label}</text>" in picture
    ElementTree.fromstring(picture)


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
