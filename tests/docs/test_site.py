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


def test_every_decision_is_in_the_index() -> None:
    index = (DOCS / "decisions.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(DOCS.glob("adr/*.md")) if f"(adr/{path.name})" not in index] == []


def test_decisions_that_the_code_names_exist() -> None:
    modules = [path for folder in ("raysgd", "operators", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {
        (str(path.relative_to(ROOT)), int(number))
        for path in modules
        for number in re.findall(r"\bADR (\d+)", path.read_text(encoding="utf-8"))
    }
    decisions = {int(path.name[:4]) for path in DOCS.glob("adr/*.md")}
    assert len(named) > 20
    assert sorted(each for each in named if each[1] not in decisions) == []


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
