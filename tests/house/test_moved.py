"""Headings that pages had are still there, or `docs/moved.txt` says where they went, and the site leads there."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.test_docs import anchors

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MOVED: dict[str, str] = runpy.run_path(str(DOCS / "moved.py"))["moved"]()
FORMER = (ROOT / "tests" / "house" / "former_headings.txt").read_text(encoding="utf-8").splitlines()


def is_there(place: str) -> bool:
    name, _, anchor = place.partition("#")
    return (DOCS / name).exists() and anchor in anchors(DOCS / name)


def test_every_former_heading_is_there_or_has_a_new_place() -> None:
    assert [place for place in FORMER if not is_there(place) and place not in MOVED] == []
    assert len(FORMER) > 300


def test_every_new_place_is_there() -> None:
    assert [new for new in MOVED.values() if not new.startswith("dropped: ") and not is_there(new)] == []


def test_what_has_moved_is_no_longer_there() -> None:
    assert [place for place in MOVED if place not in FORMER or is_there(place)] == []


def test_a_page_that_is_gone_leads_to_the_new_ones(tmp_path: Path) -> None:
    pytest.importorskip("latex2mathml", reason="the hooks of the site need what `make docs` installs")
    hooks = runpy.run_path(str(DOCS / "site_hooks.py"))
    hooks["on_post_build"](SimpleNamespace(site_dir=str(tmp_path)))
    page = (tmp_path / "testing" / "index.html").read_text(encoding="utf-8")
    assert '"random-faults": "../debugging/#random-faults"' in page
    assert 'content="0; url=../debugging/#test-your-training-with-faults"' in page
    assert not (tmp_path / "debugging").exists()
