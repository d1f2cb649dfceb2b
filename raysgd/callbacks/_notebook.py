"""The progress of a run as a card in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raysgd._cards import card, grid, note, safe

if TYPE_CHECKING:
    from raysgd.callbacks.bars import View

_MOST_ROWS = 50


def progress_card(rows: Sequence[tuple[str, Mapping[str, str]]], view: View | None, lines: Sequence[str]) -> str:
    """The card.

    Args:
        rows: The results so far, each with its label.
        view: What runs; None if nothing does.
        lines: Notes below the results.
    """
    parts = []
    if rows:
        names = list(dict.fromkeys(name for _, values in rows for name in values))
        cells = [(label, *(values.get(name, "") for name in names)) for label, values in rows[-_MOST_ROWS:]]
        parts.append(grid(["", *names], cells))
    if view is not None:
        parts.append(_bar(view))
    return card("Training", *parts, *(note(line) for line in lines), note=_left_out(len(rows)))


def _left_out(num_rows: int) -> str:
    return f"the last {_MOST_ROWS} of {num_rows} rows" if num_rows > _MOST_ROWS else ""


def _bar(view: View) -> str:
    share = f' value="{view.done}" max="{max(view.total, 1)}"' if view.total is not None else ""
    return (
        f'<div class="raysgd-note">{safe(view.title)} <progress{share}></progress> {safe(view.count)} '
        f"{safe(view.text)}</div>"
    )
