"""The site: every page is in its menu, and the address of the repository is the same everywhere."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return found


def pages_in(menu: Any) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    for entry in menu.values() if isinstance(menu, dict) else menu if isinstance(menu, list) else ():
        yield from pages_in(entry)


def test_every_page_is_in_the_menu_once() -> None:
    listed = list(pages_in(settings()["nav"]))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {
        f"adr/{path.name}" for path in DOCS.glob("adr/*.md")
    }
    assert sorted(listed) == sorted(pages)


def test_a_reader_finishes_the_pages(tmp_path: Path) -> None:
    counting = runpy.run_path(str(DOCS / "count_words.py"))
    assert len(counting["pages"]()) <= 33
    assert sum(counting["counted"]().values()) <= 28_000
    page = tmp_path / "page.md"
    page.write_text("# A title\n\n```python\nnot = counted\n```\n\n| not | counted |\n|---|---|\n\nTwo `words`.\n")
    assert counting["words"](page) == 5


@pytest.mark.parametrize("name", sorted({path.stem for path in DOCS.glob("*.md")} - {"index", "decisions"}))
def test_a_page_says_who_reads_it_and_what_they_can_do_at_its_end(name: str) -> None:
    _, first, *_ = (DOCS / f"{name}.md").read_text(encoding="utf-8").split("\n\n")
    assert first.startswith("Read this page ")
    assert "At its end" in " ".join(first.split())


def test_every_decision_is_in_the_index() -> None:
    index = (DOCS / "decisions.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(DOCS.glob("adr/*.md")) if f"(adr/{path.name})" not in index] == []


def test_a_contributor_finishes_the_decisions_and_the_architecture() -> None:
    num_words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in DOCS.glob("adr/*.md")}
    assert len(num_words) <= 30
    assert {name: number for name, number in num_words.items() if number > 500} == {}
    assert sum(num_words.values()) <= 12_000
    assert len((DOCS / "architecture.md").read_text(encoding="utf-8").split()) <= 2_500


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert settings()["theme"]["font"] is False
    assert not [entry for entry in settings().get("extra_javascript", []) if "//" in entry]


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    address = settings()["repo_url"]
    for name in ("CITATION.cff", "pyproject.toml"):
        found = re.findall(r"https://github\.com/raysgd/[\w-]+", (ROOT / name).read_text(encoding="utf-8"))
        assert set(found) == {address}, name


@pytest.mark.soak
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("needs `make docs`, which installs mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', first)
    assert "<math" in (tmp_path / "metrics/index.html").read_text(encoding="utf-8")
    assert 'data-md-component="source"' not in first, "its script asks GitHub for stars"
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<p><code>python\n" not in text, f"{page}: a fence that was not seen"
        assert "<blockquote" not in text, f"{page}: an example of a docstring that is not below `Examples:`"
        pictures = re.findall(r'<img [^>]*src="([^":]+)"', text)
        assert [name for name in pictures if not (page.parent / name).exists()] == [], page


@pytest.mark.soak
def test_a_public_name_without_a_docstring_is_found(tmp_path: Path) -> None:
    if importlib.util.find_spec("griffe") is None:
        pytest.skip("needs `make docs`, which installs griffe")
    made = runpy.run_path(str(DOCS / "public_names.py"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(
        'class Base:\n    """It."""\n    def run(self):\n        """Runs."""\n\n'
        'class Part(Base):\n    """One."""\n    def run(self): ...\n'
        "    def stop(self): ...\n    def _own(self): ...\n\n"
        "def bare(): ...\n"
    )
    found = made["without_docstring"](["package.Base", "package.Part", "package.bare"], tmp_path)
    assert found == ["package.Part.stop", "package.bare"]
    assert made["without_docstring"](made["listed"]()) == []
    assert len(made["listed"]()) > 40
