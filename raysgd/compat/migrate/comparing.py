"""Compares a program with what became of it: every statement and call means the same, up to the names of the table.

The rewriting knows syntax with its spaces and comments; this knows neither, and shares no line with it. Where the two
disagree, the program is left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from raysgd.compat.migrate.calls import rewrites
from raysgd.compat.paths import Paths

_GONE = "?"


class Comparison:
    """What two programs mean.

    Args:
        old: The program.
        new: What became of it.
        paths: Where names are now.
    """

    def __init__(self, old: ast.Module, new: ast.Module, paths: Paths) -> None:
        self._paths = paths
        self._trees = old, new
        self._imported = _imported(old), _imported(new)

    def difference(self) -> int | None:
        """Return the line of the old program that means something else in the new one; None if none does."""
        return self._in(*self._trees, 1)

    def _in(self, old: object, new: object, line: int) -> int | None:
        line = getattr(old, "lineno", line)
        old_name, new_name = _dotted(old), _dotted(new)
        if old_name and new_name:
            names = self._names(old_name, 0)
            return None if _GONE in names or names & self._names(new_name, 1) else line
        if type(old) is not type(new):
            return line
        if isinstance(old, ast.Call) and isinstance(new, ast.Call) and rewrites(self._names(_dotted(old.func), 0)):
            return self._in_rewritten(old, new, line)
        if isinstance(old, ast.AST):
            pairs = [(getattr(old, field, None), getattr(new, field, None)) for field in old._fields]
        elif isinstance(old, list) and isinstance(new, list):
            kept = [[each for each in part if not isinstance(each, ast.Import | ast.ImportFrom)] for part in (old, new)]
            if len(kept[0]) != len(kept[1]):
                return line
            pairs = list(zip(*kept, strict=True))
        else:
            return None if old == new else line
        return next((found for pair in pairs if (found := self._in(*pair, line)) is not None), None)

    def _in_rewritten(self, old: ast.Call, new: ast.Call, line: int) -> int | None:
        """A call of which the arguments may be elsewhere: each is still there."""
        there = [each for each in ast.walk(new) if isinstance(each, ast.expr)]
        for passed in [*old.args, *(keyword.value for keyword in old.keywords)]:
            parts = [*passed.keys, *passed.values] if isinstance(passed, ast.Dict) else [passed]
            for part in parts:  # an entry may be added to a config, and one that is None becomes a dict
                is_nothing = part is None or (isinstance(part, ast.Constant) and part.value is None)
                if not is_nothing and all(self._in(part, each, line) is not None for each in there):
                    return line
        return self._in(old.func, new.func, line)

    def _names(self, written: str, side: int) -> set[str]:
        """What a dotted name may be called today. One that no import brings is not one that an import brings."""
        first, dot, rest = written.partition(".")
        names = [f"{found}{dot}{rest}" for found in self._imported[side].get(first, [f"not imported: {first}"])]
        places = {name: self._paths.find(name) for name in names}
        return {name if place is None else place.new or _GONE for name, place in places.items()}


def _dotted(node: object) -> str:
    """The name with its attributes; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _imported(tree: ast.Module) -> dict[str, set[str]]:
    """The names that imports bind anywhere in a program, each with what it stands for."""
    found: dict[str, set[str]] = {}
    for name, meaning in _bound(tree):
        found.setdefault(name, set()).add(meaning)
    return found


def _bound(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in node.names)
