"""Views of a history: in a line, as text that fits the terminal, as a card of a notebook, and as a picture."""

from __future__ import annotations

import importlib.util
import io
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._imports import require
from raysgd._text import cards
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.history import readable

Rows = Sequence[Mapping[str, Any]]
Events = Sequence[GroupEvent]

NUM_COLORS = 6

_PREFIXES = ("train_", "val_")
_MOST_METRICS = 4
_MOST_ROWS = 20
_NEVER_SHOWN = ("started", "restarted")
_LARGEST = 1e100
_GRAY = "#808080"  # can be read on light and on dark ground


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
    """Return the history as HTML: curves where matplotlib is installed, the last epochs, and what happened."""
    names = readable.most_telling(readable.metrics_of(rows), _MOST_METRICS)
    curves = ""
    if len(rows) > 1 and grouped(rows, names) and importlib.util.find_spec("matplotlib") is not None:
        content = io.BytesIO()
        save_plot(rows, content, names)
        curves = cards.picture(content.getvalue(), f"{', '.join(names)} by epoch")
    told = _in_words(rows, events)
    told += [f"the last {_MOST_ROWS} are shown"] if len(rows) > _MOST_ROWS else []
    reason = cards.note(f"Stopped: {stop_reason}") if stop_reason is not None else ""
    lines = [f"{told_at(event)} {event}" for event in shown_events(events)]
    folded = cards.folded(f"what happened to the workers ({len(lines)})", lines)
    return cards.card("History", curves, cards.grid(*table_of(rows, names)), reason, folded, note=", ".join(told))


def save_plot(rows: Rows, place: Any, metrics: Sequence[str] | None = None) -> None:
    """Draws the metrics over the epochs with matplotlib, on white in a file, and on nothing in the memory.

    Args:
        rows: The epochs.
        place: The file; the ending of its name says what it is, such as `.png`, `.svg`, or `.pdf`.
        metrics: Which metrics; all if None. `train_loss` and `val_loss` share a picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: There is nothing to draw.
        KeyError: There is no such metric.
    """
    matplotlib = require("matplotlib.figure", extra="plot", purpose="`History.plot`")
    groups = grouped(rows, metrics)
    if not groups:
        raise ValueError("`History.plot`: there is no metric to draw yet; train for an epoch first.")
    columns = min(3, len(groups))
    num_rows = math.ceil(len(groups) / columns)
    figure = matplotlib.Figure(figsize=(4.6 * columns, 3.2 * num_rows), layout="constrained", dpi=120)
    places = figure.subplots(num_rows, columns, squeeze=False)
    for axes, (base, names) in zip(places.flat, groups.items(), strict=False):
        _plot_one(axes, base, names, rows)
    for axes in places.flat[len(groups) :]:
        axes.set_axis_off()
    figure.savefig(place, transparent=isinstance(place, io.BytesIO))


def _plot_one(axes: Any, base: str, names: Sequence[str], rows: Rows) -> None:
    for index, name in enumerate(names):
        points = _points(rows, name)
        marker = "o" if len(points) <= 40 else None
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=f"C{color_of(name, index)}", label=name, marker=marker, markersize=3.5)
    axes.set_title(base, loc="left", fontsize=11, fontweight="bold", parse_math=False, color=_GRAY)
    axes.set_xlabel("epoch", color=_GRAY)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(colors=_GRAY)
    axes.grid(axis="y", color=_GRAY, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(_GRAY)
    if [*names] != [base]:
        for text in axes.legend(frameon=False, fontsize=9, labelcolor=_GRAY).get_texts():
            text.set_parse_math(False)


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


def grouped(rows: Rows, metrics: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return what each chart shows: a metric of training with its sister of validation. The learning rate is last.

    What has no finite value has no chart, and a metric that equals its sister is drawn once.

    Raises:
        KeyError: There is no such metric.
    """
    names = readable.metrics_of(rows) if metrics is None else [metrics] if isinstance(metrics, str) else metrics
    known = readable.names_in(rows)
    groups: dict[str, dict[str, list[tuple[Any, float]]]] = {}
    for name in sorted(names, key=lambda name: name == "lr"):
        if name not in known:
            raise KeyError(readable.unknown(name, known))
        points = _points(rows, name)
        base = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
        if any(math.isfinite(value) for _, value in points) and points not in groups.get(base, {}).values():
            groups.setdefault(base, {})[name] = points
    return {base: [*lines] for base, lines in groups.items()}


def color_of(name: str, index: int) -> int:
    """Return which of the colors a line has that is the `index`-th of a chart: validation has always the same."""
    return 1 if name.startswith("val_") else 0 if index == 0 else (index + 1) % NUM_COLORS


def shown_events(events: Events) -> list[GroupEvent]:
    """Return the events that changed the work: failures and resizes."""
    return [event for event in events if event.kind not in _NEVER_SHOWN]


def told_at(event: GroupEvent) -> str:
    """Return when an event was over, on the clock."""
    return time.strftime("%H:%M:%S", time.localtime(event.at))


def _in_words(rows: Rows, events: Events) -> list[str]:
    return [readable.counted(len(rows), "epoch"), *readable.failures(events)]


def _points(rows: Rows, name: str) -> list[tuple[Any, float]]:
    """Return the epochs that have a metric, with its values; NaN, which is a gap, for what cannot be drawn."""
    points = []
    for number, row in enumerate(rows, start=1):
        epoch, value = row.get("epoch"), row.get(name)
        if value is not None:
            drawn = float(value) if readable.is_real(value) else math.nan
            points.append((epoch if readable.is_real(epoch) else number, drawn if abs(drawn) <= _LARGEST else math.nan))
    return points


def _columns(head: list[str], cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in (head, *cells)]
