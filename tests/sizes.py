"""How large each room of the package is: `python -m tests.sizes`, and `--write` to write `sizes.json` again.

The table beside this file has what was measured last, and what was agreed on. A room that has grown by more than a
tenth of what was agreed on needs a reason in its row; write it there by hand, or agree on the new size.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".json")
GROWTH = 1.1

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """The size of a room; comments, docstrings and blank lines do not count."""

    lines: int = 0
    statements: int = 0
    classes: int = 0
    public_names: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))


def measured() -> dict[str, Size]:
    """The size of each room, by its folder; files at the top are a room as well."""
    rooms: dict[str, Size] = {}
    for path in sources():
        folder = path.relative_to(ROOT).parent.as_posix()
        rooms[folder] = rooms.get(folder, Size()) + size_of(path.read_text(encoding="utf-8"))
    return dict(sorted(rooms.items()))


def sources() -> Iterator[Path]:
    """The modules of the package; the ready-made operators are found where they lie, not by the link to them."""
    for folder in ("raysgd", "operators"):
        yield from sorted(path for path in (ROOT / folder).rglob("*.py") if "raysgd/operators/" not in path.as_posix())


def size_of(source: str) -> Size:
    """The size of one module."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {line for node in nodes for line in _docstring_lines(node)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for each in tokens if each.type not in _NO_CODE for line in range(each.start[0], each.end[0] + 1)}
    defined = [node for node in ast.parse(source).body if isinstance(node, _WITH_DOCSTRING)]
    return Size(
        lines=len(code - docstrings),
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        public_names=sum(not getattr(node, "name", "_").startswith("_") for node in defined),
    )


def _docstring_lines(node: ast.AST) -> range:
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    return range(0)


def table() -> dict[str, dict[str, Any]]:
    """The committed table: of each room its size, what was agreed on, and the reason if it has one."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8"))) if TABLE.exists() else {}


def write(rooms: dict[str, Size]) -> None:
    """Writes the table again; what was agreed on and the reasons stay."""
    before = table()
    rows = {room: {"agreed": size.lines, **before.get(room, {}), **asdict(size)} for room, size in rooms.items()}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Prints the table, after writing it if asked."""
    rooms = measured()
    if "--write" in arguments:
        write(rooms)
    agreed = table()
    print(f"{'room':34}{'lines':>8}{'agreed':>8}{'statements':>12}{'classes':>9}{'public':>8}")
    for room, size in [*rooms.items(), ("all", sum(rooms.values(), Size()))]:
        row = agreed.get(room, {}).get("agreed", "")
        print(f"{room:34}{size.lines:8}{row:>8}{size.statements:12}{size.classes:9}{size.public_names:8}")


if __name__ == "__main__":
    main(sys.argv[1:])
