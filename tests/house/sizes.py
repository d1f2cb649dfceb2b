"""How much a reader has to hold of each room of the package: `python -m tests.house.sizes`.

With `--write` it agrees on the sizes of now.

`sizes.json` beside this file has what was agreed on. Tokens count, not lines, of which some hold three ideas.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".json")
GROWTH = 1.05

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """The size of a room. Tokens are names, numbers, strings and operators: no comments, no docstrings."""

    files: int = 0
    tokens: int = 0
    classes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))


def measured() -> dict[str, Size]:
    """The size of each room by its folder, and of the modules that stand beside the rooms."""
    rooms: dict[str, Size] = {}
    for path in sources():
        room = "/".join(path.parent.parts[:2])
        rooms[room] = rooms.get(room, Size()) + size_of((ROOT / path).read_text(encoding="utf-8"))
    return dict(sorted(rooms.items()))


def sources() -> Iterator[Path]:
    """The modules below the root; the ready-made operators are found where they lie, not by the link to them."""
    for folder in ("raysgd", "operators"):
        paths = sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
        yield from (path for path in paths if path.parts[:2] != ("raysgd", "operators"))


def size_of(source: str) -> Size:
    """The size of one module."""
    nodes = list(ast.walk(ast.parse(source)))
    prose = {line for node in nodes for line in _docstring_lines(node)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return Size(
        files=1,
        tokens=sum(token.type not in _LAYOUT and token.start[0] not in prose for token in tokens),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
    )


def _docstring_lines(node: ast.AST) -> range:
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    return range(0)


def agreed() -> dict[str, Size]:
    """The committed table."""
    return {room: Size(**row) for room, row in json.loads(TABLE.read_text(encoding="utf-8")).items()}


def grown(now: Mapping[str, Size], before: Mapping[str, Size]) -> list[str]:
    """Return the rooms that are new, or have more tokens or classes than was agreed on and a twentieth."""
    return [
        room
        for room, size in now.items()
        if size.tokens > GROWTH * before.get(room, Size()).tokens
        or size.classes > max(GROWTH * before.get(room, Size()).classes, before.get(room, Size()).classes + 1)
    ]


def main(arguments: list[str]) -> None:
    """Print the table, after writing it if asked."""
    rooms = measured()
    if "--write" in arguments:
        rows = {room: asdict(size) for room, size in rooms.items()}
        TABLE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    before = agreed()
    print(f"{'room':24}{'files':>8}{'tokens':>10}{'agreed':>10}{'classes':>9}")
    for room, size in [*rooms.items(), ("all", sum(rooms.values(), Size()))]:
        print(f"{room:24}{size.files:8}{size.tokens:10}{before.get(room, Size()).tokens:10}{size.classes:9}")


if __name__ == "__main__":
    main(sys.argv[1:])
