"""The code cells of a notebook, and the notebook with other sources in them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OLDEST = 4
_BEGIN = re.compile(r"(\ufeff?\s*)\{(?:\r?\n([ \t]+))?")
_MARK = "\0raysgd"


class NotANotebook(ValueError):
    """The text is no notebook that can be rewritten."""


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
        NotANotebook: It is no notebook, or one of a format before 4.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._content: Any = json.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise NotANotebook(f"this is no JSON: {error}") from None
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
        raise NotANotebook("this is no notebook: it has no `nbformat`")
    version = notebook["nbformat"]
    if not isinstance(version, int) or version < _OLDEST:
        advice = "convert it with `jupyter nbconvert --to notebook --inplace` first"
        raise NotANotebook(f"it is a notebook of format {version!r}: {advice}")
    cells = notebook.get("cells")
    if not isinstance(cells, list) or not all(_is_cell(cell) for cell in cells):
        raise NotANotebook("this is no notebook: its `cells` are not a list of cells with a `source`")


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
