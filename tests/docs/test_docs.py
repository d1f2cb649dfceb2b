"""The documentation names what there is, and its links lead somewhere. `test_pages.py` runs its programs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import raysgd.exceptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(.*)$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
        kind: What stands behind the opening fence.
        first_line: Number of the first line inside, from 1.
        lines: The lines inside.
    """

    kind: str
    first_line: int
    lines: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    kind, inside = None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if fence is None:
            inside.append(line)
        elif kind is None:
            kind, inside = fence[1].strip(), []
        else:
            yield Block(kind, number - len(inside), tuple(inside))
            kind = None
    assert kind is None, f"{name_of(page)}: a block is not closed"


def python_blocks(page: Path, *kinds: str) -> list[Block]:
    return [block for block in blocks(page) if block.kind in kinds]


def program(found: list[Block]) -> str:
    """The blocks as one program, each on the lines where it stands in the page, so that tracebacks point there."""
    lines: list[str] = []
    for block in found:
        lines += [""] * (block.first_line - 1 - len(lines))
        lines += block.lines
    return "\n".join(lines) + "\n"


def prose(page: Path) -> str:
    """The page without its blocks and without code inside of lines."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The names under which the headings of a page, or the tests of a file, can be linked to."""
    if page.suffix == ".py":
        return set(re.findall(r"^def (test_\w+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_all_names_of_a_program_are_defined(page: Path, tmp_path: Path) -> None:
    text = program(python_blocks(page, "python"))
    compile(text, name_of(page), "exec")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--select", "F821,F822", "-"]
    found = subprocess.run(ruff, input=text, capture_output=True, text=True)
    assert found.returncode == 0, f"{name_of(page)}:\n{found.stdout}{found.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_program_imports_from_the_library_is_there(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it when it is imported
    tree = ast.parse(program(python_blocks(page, "python")))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "raysgd":
            module = importlib.import_module(str(node.module))
            missing = [each.name for each in node.names if not hasattr(module, each.name)]
            assert missing == [], f"line {node.lineno} of {name_of(page)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_is_marked_as_python(page: Path) -> None:
    """So that all of it runs."""
    kinds = {block.kind for block in blocks(page)}
    assert kinds <= {"python", "bash", "diff", "text", "mermaid"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_the_map_leads_to_every_page() -> None:
    maps = [ROOT / "docs" / name for name in ("index.md", "decisions.md", "recipes/index.md")]
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in maps for link in LINK.findall(prose(page))}
    assert [name_of(page) for page in PAGES if page not in linked] == ["README.md", "docs/index.md"]


def test_every_public_exception_is_in_the_table_of_errors() -> None:
    public = [
        name
        for name, value in vars(raysgd.exceptions).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and not name.startswith("_")
    ]
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert len(public) >= 9
    assert [name for name in public if f"`{name}`" not in text] == []


def test_the_page_about_installing_lists_the_extras() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = settings.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, flags=re.MULTILINE))
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \|", page, flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == extras
    assert len(extras) > 10


def test_the_files_to_open_for_a_change_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## Where to change what\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    assert len(named) > 40
    assert sorted(name for name in named if not any((ROOT / top / name).exists() for top in ("raysgd", "."))) == []
