"""Formats output for people: HTML cards for notebooks, and lines for a terminal.

The cards work on light and dark backgrounds. All text in the HTML is escaped.
"""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Iterable, Sequence

_STYLE = """<style>
.raysgd-card{font:13px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;max-width:62rem;padding:10px 14px;
 border:1px solid rgba(128,128,128,.35);border-radius:8px;overflow-x:auto;color:inherit}
.raysgd-card .raysgd-title{font-weight:600;font-size:14px;margin:0 0 6px}
.raysgd-card .raysgd-title span{font-weight:400;opacity:.7;margin-left:.6em}
.raysgd-card table{border-collapse:collapse;margin:0 0 4px;border:0;font-size:13px;color:inherit;background:none}
.raysgd-card th,.raysgd-card td{padding:2px 14px 2px 0;border:0;text-align:left;vertical-align:top;white-space:nowrap;
 background:none;color:inherit}
.raysgd-card th{font-weight:500;opacity:.65}
.raysgd-card table.raysgd-grid td,.raysgd-card table.raysgd-grid th{text-align:right;
 font-variant-numeric:tabular-nums;border-bottom:1px solid rgba(128,128,128,.2)}
.raysgd-card table.raysgd-grid td:last-child,.raysgd-card table.raysgd-grid th:last-child{padding-right:0}
.raysgd-card table.raysgd-facts td{white-space:normal}
.raysgd-card .raysgd-words td,.raysgd-card .raysgd-words th{text-align:left!important}
.raysgd-card details{margin-top:6px}
.raysgd-card summary{cursor:pointer;opacity:.75}
.raysgd-card ul{margin:4px 0 0;padding-left:1.2em}
.raysgd-card .raysgd-note{opacity:.75;margin-top:6px}
</style>"""


def card(title: str, *parts: str, note: str = "") -> str:
    """Return an HTML card with a heading.

    Args:
        title: The heading, as plain text.
        parts: The content below the heading, as HTML.
        note: Plain text next to the heading.
    """
    beside = f"<span>{safe(note)}</span>" if note else ""
    heading = f'<div class="raysgd-title">{safe(title)}{beside}</div>'
    return f'<div class="raysgd-card">{_STYLE}{heading}{"".join(parts)}</div>'


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


def safe(text: object) -> str:
    """Return a value as text that is escaped for HTML."""
    return html.escape(str(text))
