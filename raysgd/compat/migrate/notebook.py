"""Rewrites the code cells of a notebook as one program: a name that one cell imports is used in the next ones.

What IPython adds to Python, such as `%time` and `!pip`, is put aside meanwhile.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.compat.migrate.names import Finding
from raysgd.compat.migrate.source import MigratedProgram, migrate

_OLDEST = 4
_BEGIN = re.compile(r"(\ufeff?\s*)\{(?:\r?\n([ \t]+))?")
_MARK = "\0raysgd"

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
    except UnicodeError as error:
        return MigratedProgram(text, [Finding(1, f"it cannot be read as UTF-8: {error}", is_error=True)])
    except ValueError as error:
        return MigratedProgram(text, [Finding(1, str(error), is_error=True)])
    cells = [cell for cell in notebook.code_cells if cell.source]
    if not any("ray" in cell.source for cell in cells):
        return MigratedProgram(text, [])
    return _Program(notebook, cells).migrated(ray_train)


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


@dataclass(frozen=True)
class Cell:
    """The source of a code cell.

    Attributes:
        source: Its text.
        number: Among the cells of the notebook, from 1.
    """

    source: str
    number: int


class Notebook:
    """A notebook. It is written again in the manner in which it stands: as Jupyter writes it, or with other indents.

    Args:
        text: The file.

    Raises:
        ValueError: It is no notebook, or one of a format before 4.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._content: Any = json.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is no JSON: {error}") from None
        _check(self._content)

    @property
    def code_cells(self) -> list[Cell]:
        """The code cells, in order; none if the language is not Python."""
        cells = self._content["cells"] if _language(self._content) == "python" else []
        numbered = [(number, cell) for number, cell in enumerate(cells, start=1) if cell.get("cell_type") == "code"]
        return [Cell("".join(cell["source"]), number) for number, cell in numbered]

    def with_sources(self, new: Mapping[int, str]) -> str:
        """Return the text with other sources, by the number of their cell. Cells that stay are written as they are."""
        old = {cell.number: cell.source for cell in self.code_cells}
        changed = {number: source for number, source in new.items() if source != old[number]}
        cells = self._content["cells"]
        as_lines = {number for number in changed if not isinstance(cells[number - 1]["source"], str)}
        written = {number: [*io.StringIO(each)] if number in as_lines else each for number, each in changed.items()}
        return self._written(written) if changed else self.text

    def line_of(self, cell: Cell) -> int:
        """Return the line of the file in which the source of a cell begins."""
        return self._written({cell.number: _MARK}).partition(json.dumps(_MARK))[0].count("\n") + 1

    def _written(self, sources: Mapping[int, str | list[str]]) -> str:
        begin = _BEGIN.match(self.text)
        assert begin is not None, "a notebook is an object of JSON"
        cells = [*self._content["cells"]]
        for number, source in sources.items():
            cells[number - 1] = {**cells[number - 1], "source": source}
        text = json.dumps({**self._content, "cells": cells}, ensure_ascii=self.text.isascii(), indent=begin[2])
        text = text.replace("\n", "\r\n") if "\r\n" in self.text else text
        return f"{begin[1]}{text}{self.text[len(self.text.rstrip()) :]}"


def _check(notebook: Any) -> None:
    if not isinstance(notebook, dict) or "nbformat" not in notebook:
        raise ValueError("this is no notebook: it has no `nbformat`")
    version = notebook["nbformat"]
    if not isinstance(version, int) or version < _OLDEST:
        advice = "convert it with `jupyter nbconvert --to notebook --inplace` first"
        raise ValueError(f"it is a notebook of format {version!r}: {advice}")
    cells = notebook.get("cells")
    if not isinstance(cells, list) or not all(_is_cell(cell) for cell in cells):
        raise ValueError("this is no notebook: its `cells` are not a list of cells with a `source`")


def _is_cell(cell: Any) -> bool:
    source = cell.get("source") if isinstance(cell, dict) else None
    return isinstance(source, str) or (isinstance(source, list) and all(isinstance(line, str) for line in source))


def _language(notebook: Mapping[str, Any]) -> str:
    metadata = notebook.get("metadata")
    for place, key in (("kernelspec", "language"), ("language_info", "name")):
        found = metadata.get(place) if isinstance(metadata, dict) else None
        if isinstance(found, dict) and isinstance(found.get(key), str):
            return str(found[key]).lower()
    return "python"
