"""Rewrites the code cells of a notebook as one program: a name that one cell imports is used in the next ones.

What IPython adds to Python, such as `%time` and `!pip`, is put aside meanwhile.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raysgd.compat.migrate.cells import Cell, NotANotebook, Notebook
from raysgd.compat.migrate.findings import Finding
from raysgd.compat.migrate.source import MigratedProgram, migrate

_AROUND_PYTHON = re.compile(r"%%(time|timeit|capture|prun)\b")
_OF_IPYTHON = re.compile(r"^(\s*)(?:[%!?]|[\w.,\s]+=\s*[%!]|[\w.]+\?{1,2}\s*$)")
_OLD = "ray.util.sgd"
_HEAD = "#\n#\n"
"""So that no cell stands in the first two lines, where a comment may name an encoding."""


def migrate_notebook(text: bytes, ray_train: bool = False) -> MigratedProgram:
    """Rewrites a notebook. A line that only a person can rewrite gets a comment.

    Args:
        text: The file.
        ray_train: Whether `ray.train` and `ray.air` mean the old library, and not today's Ray.
    """
    try:
        notebook = Notebook(text.decode("utf-8"))
        cells = [cell for cell in notebook.code_cells if cell.source]
        if not any("ray" in cell.source for cell in cells):
            return MigratedProgram(text, [])
        return _Program(notebook, cells).migrated(ray_train)
    except UnicodeError as error:
        return MigratedProgram(text, [Finding(1, f"it cannot be read as UTF-8: {error}", is_error=True)])
    except NotANotebook as error:
        return MigratedProgram(text, [Finding(1, str(error), is_error=True)])


@dataclass(frozen=True)
class _CellCode:
    """A cell as a part of a program.

    Attributes:
        cell: The cell.
        head: Its first line, if that has to stay the first.
        code: The rest, as Python.
        put_aside: What stands for lines of IPython in `code`, with the lines.
        problem: Why it is no Python.
    """

    cell: Cell
    head: str
    code: str
    put_aside: tuple[tuple[str, str], ...] = ()
    problem: str = ""

    def source(self, code: str) -> str:
        """The source of the cell with other code."""
        for name, line in self.put_aside:
            code = code.replace(name, line)
        return self.head + (code if self.cell.source.endswith("\n") else code.removesuffix("\n"))


class _Program:
    """The cells of a notebook as one program."""

    def __init__(self, notebook: Notebook, cells: Sequence[Cell]) -> None:
        self._notebook = notebook
        self._name = _unused_name(cells)
        self._parts = [part for cell in cells if (part := self._part(cell)) is not None]
        of_python = {part.cell.number for part in self._parts}
        self._left = [cell for cell in cells if cell.number not in of_python]

    def migrated(self, ray_train: bool) -> MigratedProgram:
        """The notebook, rewritten."""
        broken = [self._finding(part.cell, 1, part.problem, is_error=True) for part in self._parts if part.problem]
        if broken:
            return MigratedProgram(self._notebook.text.encode(), broken)
        program = _HEAD + "".join(f"{self._name}\n{part.code}" for part in self._parts)
        found = migrate(program.encode(), ray_train)
        findings = sorted([*self._left_alone(), *(self._located(finding) for finding in found.findings)])
        if found.text == program.encode():
            return MigratedProgram(self._notebook.text.encode(), findings)
        return MigratedProgram(self._notebook.with_sources(self._sources(found.text.decode())).encode(), findings)

    def _part(self, cell: Cell) -> _CellCode | None:
        """The cell as a part; None for one in another language."""
        head, code = "", cell.source
        if code.startswith("%%"):
            if not _AROUND_PYTHON.match(code):
                return None
            first, newline, code = code.partition("\n")
            head = first + newline
        code = code if code.endswith("\n") else f"{code}\n"
        part = _CellCode(cell, head, code)
        if not (problem := _problem(code)):
            return part
        names: dict[str, str] = {}
        part = replace(part, code=self._without_ipython(code, names), put_aside=tuple(names.items()))
        return replace(part, problem=problem) if _problem(part.code) else part

    def _without_ipython(self, code: str, names: dict[str, str]) -> str:
        lines, is_continued = [], False
        for number, line in enumerate(code.splitlines(keepends=True)):
            found = _OF_IPYTHON.match(line)
            if not found and not is_continued:
                lines.append(line)
                continue
            text = line.rstrip("\r\n")
            indent = found[1] if found and not is_continued else ""
            name = f"{self._name}line_{number}_"
            names[name] = text[len(indent) :]
            lines.append(f"{indent}{name}{line[len(text) :]}")
            is_continued = text.endswith("\\")
        return "".join(lines)

    def _sources(self, program: str) -> dict[int, str]:
        """The new sources, by the number of their cell; imports that were added go to the first one that changed."""
        added, *codes = program.split(f"{self._name}\n")
        imports = [line for line in added.removeprefix(_HEAD).splitlines(keepends=True) if line.strip()]
        sources = {}
        for part, code in zip(self._parts, codes, strict=True):
            if code != part.code and imports:
                code, imports = _with_imports(code, imports), []
            sources[part.cell.number] = part.source(code)
        return sources

    def _left_alone(self) -> Iterator[Finding]:
        """Old names in what is not Python."""
        for cell in self._left:
            if _OLD in cell.source:
                yield self._finding(cell, 1, "the cell is unchanged, because it is not Python: look at its old names")
        for part in self._parts:
            for _, line in part.put_aside:
                if _OLD in line:
                    number = part.cell.source.splitlines().index(next(_lines_with(part.cell.source, line))) + 1
                    yield self._finding(part.cell, number, "the line is unchanged, because it belongs to IPython")

    def _located(self, finding: Finding) -> Finding:
        """A finding about the program, as one about a line of a cell."""
        first = _HEAD.count("\n") + 2
        for part in self._parts:
            length = part.code.count("\n")
            if finding.line < first + length:
                break
            first += length + 1
        line = max(finding.line - first, 0) + part.head.count("\n") + 1
        return self._finding(part.cell, line, finding.text, finding.is_error)

    def _finding(self, cell: Cell, line: int, text: str, is_error: bool = False) -> Finding:
        return Finding(self._notebook.line_of(cell), f"cell {cell.number}, line {line}: {text}", is_error)


def _unused_name(cells: Sequence[Cell]) -> str:
    """A name that no cell uses."""
    candidates = (f"_raysgd_cell_{number}_" for number in itertools.count())
    return next(name for name in candidates if not any(name in cell.source for cell in cells))


def _problem(code: str) -> str:
    """Returns why it is no Python; empty if it is."""
    try:
        ast.parse(code)
    except SyntaxError as error:
        return f"this is no valid Python (line {error.lineno or 1}): {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be read as Python: {error}"
    return ""


def _with_imports(code: str, imports: Sequence[str]) -> str:
    """The code with more imports at its top, behind those of `__future__`; those that it has are left out."""
    lines = code.splitlines(keepends=True)
    first = max((number for number, line in enumerate(lines, 1) if line.startswith("from __future__")), default=0)
    return "".join([*lines[:first], *(line for line in imports if line not in lines), *lines[first:]])


def _lines_with(source: str, text: str) -> Iterator[str]:
    return (line for line in source.splitlines() if text in line)
