"""Rewrites the text of one program."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper

from raysgd.compat.migrate.comparing import Comparison
from raysgd.compat.migrate.findings import Finding, Findings
from raysgd.compat.migrate.names import OldNames
from raysgd.compat.paths import Paths

_ANY_OF = re.compile(rb"\b(ray|horovod|keras)")
"""In every program in which there is something to do."""
_MARKS = ("ray.util.sgd", "ray.tune.integration", "ray.util.data", "raysgd")


@dataclass(frozen=True)
class MigratedProgram:
    """A program after it was rewritten.

    Attributes:
        text: The new text; the old one where nothing is to be done, or where it could not be read.
        findings: What a person has to look at.
    """

    text: bytes
    findings: list[Finding]

    def or_nothing(self, before: bytes) -> MigratedProgram:
        """The same, with the old text if something is left for a person."""
        return MigratedProgram(before, self.findings) if self.has_failed else self

    @property
    def has_failed(self) -> bool:
        """True if something is left that only a person can rewrite."""
        return any(finding.is_error for finding in self.findings)


def migrate(text: bytes, ray_train: bool = False) -> MigratedProgram:
    """Rewrites a program. A line that only a person can rewrite gets a comment.

    Args:
        text: The file, as it is on the disk.
        ray_train: Whether `ray.train` and `ray.air` mean the old library, and not today's Ray.
    """
    findings = Findings()
    try:
        tree = ast.parse(text)  # first, because the other parser ends the process where code is nested very deeply
        if not _ANY_OF.search(text):
            return MigratedProgram(text, [])
        module = cst.parse_module(text)
        source = text.decode(module.encoding)
    except SyntaxError as error:
        findings.add(error.lineno or 1, f"this is no valid Python: {error.msg}", is_error=True)
        return MigratedProgram(text, findings.sorted())
    except (cst.ParserSyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        findings.add(1, f"it cannot be read as Python: {error}", is_error=True)
        return MigratedProgram(text, findings.sorted())
    paths = Paths(ray_train, any(mark in source for mark in _MARKS))
    try:
        new = _rewritten(module, source, paths, findings).bytes
        changed = Comparison(tree, ast.parse(new), paths).difference() if new != text else None
    except RecursionError:
        findings = Findings()
        findings.add(1, "its code is nested too deeply, or joins too many parts in one expression", is_error=True)
        return MigratedProgram(text, findings.sorted())
    if changed is not None:
        findings = Findings()
        findings.add(changed, "this line would mean something else: rewrite the file yourself", is_error=True)
        return MigratedProgram(text, findings.sorted())
    _report_texts(tree, paths, findings)
    return MigratedProgram(new, findings.sorted())


def _rewritten(module: cst.Module, source: str, paths: Paths, findings: Findings) -> cst.Module:
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


def _report_texts(tree: ast.Module, paths: Paths, findings: Findings) -> None:
    """Reports old names in strings, such as those that are patched in tests."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not node.value.startswith("ray."):
            continue
        if (place := paths.find(node.value)) is not None:
            now = f"it is `{place.new}` now" if place.new else f"it has no successor: {place.reason}"
            findings.add(node.lineno, f"the string {node.value!r} is unchanged: {now}")
