"""Test files say which modules they cover, where their names do not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def dotted(module: Path) -> str:
    """What it is imported as."""
    parts = module.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "raysgd" else ("raysgd", *parts))


def covered() -> set[str]:
    """The modules that docstrings of test files name, in a paragraph that begins with "Covers"."""
    named: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for paragraph in docstring.split("\n\n"):
            if paragraph.startswith("Covers "):
                named.update(re.findall(r"`(raysgd\.[\w.]+)`", paragraph))
    return named


def test_docstrings_name_modules_that_there_are() -> None:
    modules = {dotted(path) for folder in ("raysgd", "operators") for path in (ROOT / folder).rglob("*.py")}
    assert sorted(covered() - modules) == []
