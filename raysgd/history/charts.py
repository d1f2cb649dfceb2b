"""Views of a history: in a line, as text that fits the terminal, and as a card of a notebook."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._text import cards
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.history import readable

Rows = Sequence[Mapping[str, Any]]
Events = Sequence[GroupEvent]

_MOST_METRICS = 4
_MOST_ROWS = 20
_NEVER_SHOWN = ("started", "restarted")
_LARGEST = 1e100


def as_line(rows: Rows, events: Events, stop_reason: str | None) -> str:
    """Return the history in one line, with the metrics of the last epoch that say most."""
    told = _in_words(rows, events)
    if stop_reason is not None:
        told.append(f"stopped: {stop_reason}")
    last = readable.chosen(rows[-1], None) if rows else {}
    values = ", ".join(f"{name}={last[name]:.4g}" for name in readable.most_telling(last, _MOST_METRICS))
    return f"<History: {', '.join(told)}{'; last: ' if values else ''}{values}>"


def as_text(rows: Rows, events: Events, stop_reason: str | None) -> str:
    """Return the last epochs as a table, and what happened to the workers. It fits the terminal."""
    lines, metrics = ["no epochs"], readable.metrics_of(rows)
    names = metrics
    for most in range(_MOST_METRICS, 0, -1) if rows else ():
        names = readable.most_telling(metrics, most)
        lines = _columns(*table_of(rows, names))
        if len(lines[0]) <= cards.width():
            break
    if len(rows) > _MOST_ROWS:
        lines.insert(1, f"({len(rows) - _MOST_ROWS} more)")
    if left_out := [name for name in metrics if name not in names]:
        lines.append(cards.fitted(f"also measured: {', '.join(left_out)}"))
    lines += [cards.fitted(f"{told_at(event)} {event}", indent=9) for event in shown_events(events)]
    return "\n".join([*lines, *([cards.fitted(f"stopped: {stop_reason}")] if stop_reason is not None else [])])


def as_card(rows: Rows, events: Events, stop_reason: str | None) -> str:
    """Return the history as HTML: the last epochs, and what happened."""
    names = readable.most_telling(readable.metrics_of(rows), _MOST_METRICS)
    told = _in_words(rows, events)
    told += [f"the last {_MOST_ROWS} are shown"] if len(rows) > _MOST_ROWS else []
    reason = cards.note(f"Stopped: {stop_reason}") if stop_reason is not None else ""
    lines = [f"{told_at(event)} {event}" for event in shown_events(events)]
    folded = cards.folded(f"what happened to the workers ({len(lines)})", lines)
    return cards.card("History", cards.grid(*table_of(rows, names)), reason, folded, note=", ".join(told))


def table_of(rows: Rows, names: Sequence[str], most: int = _MOST_ROWS) -> tuple[list[str], list[list[str]]]:
    """Return the head and the cells of a table of the last epochs, with these metrics and the time."""
    table = []
    for number, row in [*enumerate(rows, start=1)][-most:]:
        values = [readable.number(row[name]) if row.get(name) is not None else "" for name in names]
        took = readable.seconds(row["seconds"]) if readable.is_real(row.get("seconds")) else ""
        table.append([str(row.get("epoch", number)), *values, took])
    if any(cells[-1] for cells in table):
        return ["epoch", *names, "time"], table
    return ["epoch", *names], [cells[:-1] for cells in table]


def grouped(rows: Rows) -> dict[str, list[str]]:
    """Return the lines of each chart: a metric of training with its sister of validation. The learning rate is last.

    What has no value that can be drawn has no line, and a metric that equals its sister is drawn once.
    """
    groups: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(readable.metrics_of(rows), key=lambda name: name == "lr"):
        base = name.removeprefix("train_").removeprefix("val_")
        values: list[Any] = [row.get(name) for row in rows]
        can_be_drawn = any(readable.is_real(value) and abs(float(value)) <= _LARGEST for value in values)
        if can_be_drawn and values not in groups.get(base, {}).values():
            groups.setdefault(base, {})[name] = values
    return {base: [*lines] for base, lines in groups.items()}


def shown_events(events: Events) -> list[GroupEvent]:
    """Return the events that changed the work: failures and resizes."""
    return [event for event in events if event.kind not in _NEVER_SHOWN]


def told_at(event: GroupEvent) -> str:
    """Return when an event was over, on the clock."""
    return time.strftime("%H:%M:%S", time.localtime(event.at))


def _in_words(rows: Rows, events: Events) -> list[str]:
    return [readable.counted(len(rows), "epoch"), *readable.failures(events)]


def _columns(head: list[str], cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in (head, *cells)]
