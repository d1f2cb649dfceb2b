"""Formats output for people: HTML cards for notebooks, and lines for a terminal.

The cards work on light and dark backgrounds, with the styles in `cards.css`. All text in the HTML is escaped.
"""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path


def card(title: str, *parts: str, note: str = "") -> str:
    """Return an HTML card with a heading.

    Args:
        title: The heading, as plain text.
        parts: The content below the heading, as HTML.
        note: Plain text next to the heading.
    """
    beside = f"<span>{safe(note)}</span>" if note else ""
    heading = f'<div class="raysgd-title">{safe(title)}{beside}</div>'
    styles = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return f'<div class="raysgd-card"><style>\n{styles}</style>{heading}{"".join(parts)}</div>'


def two_column_table(rows: Iterable[tuple[str, str]], kind: str = "raysgd-facts") -> str:
    """Return an HTML table of names and values, with the CSS class `kind`."""
    body = "".join(f"<tr><th>{safe(name)}</th><td>{safe(value)}</td></tr>" for name, value in rows)
    return f'<table class="{kind}">{body}</table>'


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "raysgd-grid") -> str:
    """Return an HTML table with a header row and the CSS class `kind`."""
    top = "".join(f"<th>{safe(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def folded(summary: str, lines: Sequence[str]) -> str:
    """Return lines as an HTML list that is collapsed until the user clicks it.

    Return an empty string if there are no lines.
    """
    items = "".join(f"<li>{safe(line)}</li>" for line in lines)
    return f"<details><summary>{safe(summary)}</summary><ul>{items}</ul></details>" if lines else ""


def note(text: str) -> str:
    """Return a remark as HTML. Pass it to `card` as one of the parts."""
    return f'<div class="raysgd-note">{safe(text)}</div>'


def fitted(text: str, indent: int = 2) -> str:
    """Wrap text to the terminal's width. Lines after the first are indented."""
    return textwrap.fill(text, width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def width() -> int:
    """Return the terminal's width in columns, at least 40.

    The environment variable COLUMNS, if it is set, replaces the terminal's width. Without a terminal, the width is 80.
    """
    return max(40, shutil.get_terminal_size().columns)


def named_lines(rows: Iterable[tuple[str, str]], indent: int = 12) -> list[str]:
    """Return names and values as lines that fit the terminal. The values are aligned in one column."""
    return [fitted(f"{name + ':':<{indent}}{value}", indent) for name, value in rows]


def in_columns(rows: Sequence[Sequence[str]], indent: int = 0) -> list[str]:
    """Return the rows of a table as lines of text, with columns that are aligned on the right.

    Args:
        rows: The cells of each row. The first row may be the header.
        indent: Number of spaces at the beginning of each line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" " * indent + "  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]


def safe(text: object) -> str:
    """Return a value as text that is escaped for HTML."""
    return html.escape(str(text))
