"""The code cells of a notebook: where they stand in its JSON, so that only what changes is written.

Everything between them stays, character by character: outputs, metadata, the order of keys, spaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_OLDEST = 4


class NotANotebook(ValueError):
    """The text is no notebook that can be rewritten."""


@dataclass(frozen=True)
class Cell:
    """The source of a code cell.

    Attributes:
        source: Its text.
        number: Among the cells of the notebook, from 1.
        start: Where the JSON value of the source begins.
        end: Where it ends.
    """

    source: str
    number: int
    start: int
    end: int


def code_cells(text: str) -> list[Cell]:
    """The code cells of a notebook, in order; none if its language is not Python.

    Args:
        text: The file.

    Raises:
        NotANotebook: It is no notebook, or one of a format before 4.
    """
    try:
        begin = _skip_space(text, int(text.startswith("\ufeff")))
        notebook, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        raise NotANotebook(f"this is no JSON: {error}") from None
    if text[end:].strip():
        raise NotANotebook("this is no JSON: something follows the end")
    _check(notebook)
    return list(_cells(text, begin)) if _language(notebook) == "python" else []


def with_sources(text: str, new: Mapping[int, str]) -> str:
    """The notebook with other sources.

    Args:
        text: The file.
        new: Sources by the number of their cell.
    """
    for cell in reversed(code_cells(text)):
        if cell.number in new and new[cell.number] != cell.source:
            raw = text[cell.start : cell.end]
            text = text[: cell.start] + _as_written(raw, new[cell.number]) + text[cell.end :]
    return text


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


def _cells(text: str, begin: int) -> Iterator[Cell]:
    start, _ = dict(_members(text, begin))["cells"]
    for number, (position, _) in enumerate(_items(text, start), start=1):
        members = dict(_members(text, position))  # the last one of a key that is there twice, as Python reads it
        if "cell_type" in members and _value(text, members["cell_type"]) == "code":
            source = _value(text, members["source"])
            yield Cell(source if isinstance(source, str) else "".join(source), number, *members["source"])


def _value(text: str, span: tuple[int, int]) -> Any:
    return _DECODER.raw_decode(text, span[0])[0]


def _members(text: str, begin: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The keys of the object that begins there, with where their values are."""
    position = _skip_space(text, begin + 1)
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        start = _skip_space(text, _skip_space(text, position) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, start)
        yield key, (start, end)
        position = _behind_comma(text, end)


def _items(text: str, begin: int) -> Iterator[tuple[int, int]]:
    """Returns where the items of the list are that begins there."""
    position = _skip_space(text, begin + 1)
    while text[position] != "]":
        _, end = _DECODER.raw_decode(text, position)
        yield position, end
        position = _behind_comma(text, end)


def _behind_comma(text: str, position: int) -> int:
    position = _skip_space(text, position)
    return _skip_space(text, position + 1) if text[position] == "," else position


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _as_written(raw: str, source: str) -> str:
    """A source as JSON, in the manner of the one that it replaces: lines that are not new are kept as they stand."""
    if raw.startswith('"'):
        return json.dumps(source, ensure_ascii=raw.isascii())
    spans = list(_items(raw, 0))
    known = {_value(raw, span): raw[slice(*span)] for span in spans}
    opening, closing = raw[1 : spans[0][0]], raw[spans[-1][1] : -1]
    between = raw[spans[0][1] : spans[1][0]] if len(spans) > 1 else f",{opening}"
    lines = source.splitlines(keepends=True)
    written = [known.get(line) or json.dumps(line, ensure_ascii=raw.isascii()) for line in lines]
    return f"[{opening}{between.join(written)}{closing}]"
