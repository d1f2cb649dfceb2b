"""Rewrites the text of one program, and compares it with what became of it.

The rewriting knows syntax with its spaces and comments. The comparison knows neither, and shares no line with it: every
statement and call means the same, up to the names of the table. Where the two disagree, the program is left alone.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper

from raysgd._files import replacing
from raysgd.compat.migrate.calls import rewrites
from raysgd.compat.migrate.names import Finding, OldNames
from raysgd.compat.paths import Paths

_ANY_OF = re.compile(rb"\b(ray|horovod|keras)")
"""In every program in which there is something to do."""
_GONE = "?"
_WRITABLE = 0o222
_MARKS = ("ray.util.sgd", "ray.tune.integration", "ray.util.data", "raysgd")


@dataclass(frozen=True)
class MigratedProgram:
    """A program after it was rewritten.

    Attributes:
        before: The old text.
        text: The new text; the old one where nothing is to be done, or where it could not be read.
        findings: What a person has to look at.
        path: The file that it is in.
    """

    before: bytes
    text: bytes
    findings: list[Finding]
    path: Path = Path()

    @property
    def has_failed(self) -> bool:
        """True if something is left that only a person can rewrite."""
        return any(finding.is_error for finding in self.findings)

    @property
    def has_changed(self) -> bool:
        """True if there is something to write."""
        return self.before != self.text

    def diff(self) -> str:
        """The change, as `git apply` takes it."""
        texts, name = (_lines(self.before), _lines(self.text)), str(self.path).lstrip("/")
        return "".join(difflib.unified_diff(*texts, f"a/{name}", f"b/{name}"))

    def replace_file(self) -> None:
        """Replaces the file; its permissions stay.

        Raises:
            OSError: It could not be written; it is as it was.
        """
        if not self.path.stat().st_mode & _WRITABLE:
            raise PermissionError(f"`{self.path}` is read-only")
        with replacing(str(self.path.resolve())) as file:
            file.write(self.text)


def _lines(text: bytes) -> list[str]:
    return text.decode("utf-8", errors="replace").splitlines(keepends=True)


def migrate(text: bytes, ray_train: bool = False) -> MigratedProgram:
    """Rewrites a program. A line that only a person can rewrite gets a comment.

    Args:
        text: The file, as it is on the disk.
        ray_train: Whether `ray.train` and `ray.air` mean the old library, and not today's Ray.
    """
    try:
        tree = ast.parse(text)  # first, because the other parser ends the process where code is nested very deeply
        if not _ANY_OF.search(text):
            return MigratedProgram(text, text, [])
        module = cst.parse_module(text)
        source = text.decode(module.encoding)
    except SyntaxError as error:
        return _unchanged(text, error.lineno or 1, f"this is no valid Python: {error.msg}")
    except (cst.ParserSyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        return _unchanged(text, 1, f"it cannot be read as Python: {error}")
    paths, findings = Paths(ray_train, any(mark in source for mark in _MARKS)), set[Finding]()
    try:
        new = _rewritten(module, source, paths, findings).bytes
        changed = Comparison(tree, ast.parse(new), paths).difference() if new != text else None
    except RecursionError:
        return _unchanged(text, 1, "its code is nested too deeply, or joins too many parts in one expression")
    if changed is not None:
        return _unchanged(text, changed, "this line would mean something else: rewrite the file yourself")
    _report_texts(tree, paths, findings)
    return MigratedProgram(text, new, sorted(findings))


def _unchanged(text: bytes, line: int, reason: str) -> MigratedProgram:
    return MigratedProgram(text, text, [Finding(line, reason, is_error=True)])


def _rewritten(module: cst.Module, source: str, paths: Paths, findings: set[Finding]) -> cst.Module:
    program = MetadataWrapper(module, unsafe_skip_copy=True)  # it comes from the parser: no node is in it twice
    names = OldNames(program, source, paths, findings)
    changed = program.visit(names)
    uses_ray = names.dropped_ray and any(
        isinstance(node, ast.Name) and node.id == "ray" for node in ast.walk(ast.parse(changed.bytes))
    )
    return _with_imports(changed, sorted(names.needs | ({"ray"} if uses_ray else set())))


def _with_imports(module: cst.Module, needs: Sequence[str]) -> cst.Module:
    """The program with more modules imported, below its first imports."""
    first = int(module.get_docstring() is not None)
    last = first
    while last < len(module.body) and _is_import(module.body[last]):
        last += 1
    there = {module.code_for_node(line.with_changes(leading_lines=[])).strip() for line in module.body[first:last]}
    new = [f"import {name}" for name in needs if f"import {name}" not in there]
    if not new:
        return module
    lines = [cst.parse_statement(line, config=module.config_for_parsing) for line in new]
    rest = list(module.body[last:])
    if rest and not rest[0].leading_lines:
        rest[0] = rest[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    return module.with_changes(body=[*module.body[:last], *lines, *rest])


def _is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and all(
        isinstance(each, cst.Import | cst.ImportFrom) for each in line.body
    )


def _report_texts(tree: ast.Module, paths: Paths, findings: set[Finding]) -> None:
    """Reports old names in strings, such as those that are patched in tests."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not node.value.startswith("ray."):
            continue
        if (place := paths.find(node.value)) is not None:
            now = f"it is `{place.new}` now" if place.new else f"it has no successor: {place.reason}"
            findings.add(Finding(node.lineno, f"the string {node.value!r} is unchanged: {now}"))


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
