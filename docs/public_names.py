"""Names in the reference that have no docstring: `make docs` fails because of them.

A method needs none if a class that it comes from documents it; neither do those with two underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import griffe

DOCS = Path(__file__).parent
LISTED = re.compile(r"^::: (\S+)", re.MULTILINE)


def listed() -> list[str]:
    """The names that the pages of the reference list."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    return [name for page in pages for name in LISTED.findall(page.read_text(encoding="utf-8"))]


def without_docstring(names: Sequence[str], folder: Path = DOCS.parent) -> list[str]:
    """Those of the names, and of their methods, that have no docstring."""
    loader = griffe.GriffeLoader(search_paths=[folder])
    for package in sorted({name.partition(".")[0] for name in names}):
        loader.load(package)
    loader.resolve_aliases(external=False)
    return [found for name in names for found in _bare(name, loader.modules_collection[name])]


def _bare(name: str, found: Any) -> Iterator[str]:
    if not found.has_docstring:
        yield name
    if found.is_class:
        lineage = [found, *found.mro()]
        public = (each.name for each in found.members.values() if each.is_function and not each.name.startswith("_"))
        yield from (f"{name}.{method}" for method in public if not _is_documented(method, lineage))


def _is_documented(method: str, lineage: Sequence[Any]) -> bool:
    return any(method in each.members and each.members[method].has_docstring for each in lineage)
