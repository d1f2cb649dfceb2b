"""A `History` for people, as text, as a card in a notebook, and as a picture: of its rows and events."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._imports.optional import require
from raysgd._text import cards
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.history import readable
from raysgd.history.charts import NUM_COLORS, Series, figure

Rows = Sequence[Mapping[str, Any]]
Events = Sequence[GroupEvent]

COLORS = ("#2a78d6", "#e0662f", "#1a9a6c", "#c08a00", "#d0568a", "#7463d4")
"""Of lines: they can be told apart on light and on dark ground."""

_PREFIXES = ("train_", "val_")
_MOST_ROWS = 20
_MOST_CHARTS = 6
_NEVER_SHOWN = ("started", "restarted")


def as_line(rows: Rows, events: Events, stop_reason: str | None) -> str:
    """Return the history in one line, with the metrics of the last epoch."""
    told = _in_words(rows, events)
    if stop_reason is not None:
        told.append(f"stopped: {stop_reason}")
    last = readable.chosen(rows[-1], None) if rows else {}
    values = ", ".join(f"{name}={value:.4g}" for name, value in last.items())
    return f"<History: {', '.join(told)}{'; last: ' if values else ''}{values}>"


def as_text(rows: Rows, events: Events, stop_reason: str | None) -> str:
    """Return the last epochs as a table, and what happened to the workers."""
    head, cells = table_of(rows)
    lines = _columns([head, *cells]) if cells else ["no epochs"]
    if len(rows) > len(cells):
        lines.insert(1, f"({len(rows) - len(cells)} more)")
    lines += [f"{_at(event)} {event}" for event in shown_events(events)]
    if stop_reason is not None:
        lines.append(f"stopped: {stop_reason}")
    return "\n".join(lines)


def as_card(rows: Rows, events: Events, stop_reason: str | None) -> str:
    """Return the history as HTML: curves, the last epochs, and what happened to the workers."""
    head, cells = table_of(rows)
    groups = grouped_series(rows)[:_MOST_CHARTS] if len(rows) > 1 else []
    charts = "".join(figure(base, series, "raysgd-chart") for base, series in groups)
    parts = [f'<div class="raysgd-charts">{charts}</div>' if charts else "", cards.grid(head, cells) if cells else ""]
    told = _in_words(rows, events)
    told += [f"the last {len(cells)} are shown"] if len(rows) > len(cells) else []
    reason = cards.note(f"Stopped: {stop_reason}") if stop_reason is not None else ""
    lines = [f"{_at(event)} {event}" for event in shown_events(events)]
    folded = cards.folded(f"what happened to the workers ({len(lines)})", lines)
    return _CHART_STYLE + cards.card("History", *parts, reason, folded, note=", ".join(told))


def save_plot(rows: Rows, path: str | os.PathLike[str], metrics: Sequence[str] | None = None) -> None:
    """Draws the metrics over the epochs with matplotlib.

    Args:
        rows: The epochs.
        path: Where to write; the ending says what, such as `.png`, `.svg`, or `.pdf`.
        metrics: Which metrics; all if None. `train_loss` and `val_loss` share a picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: There is nothing to draw.
        KeyError: There is no such metric.
    """
    figure_module = require("matplotlib.figure", extra="plot", purpose="`History.plot`")
    groups = grouped_series(rows, metrics)
    if not groups:
        raise ValueError("`History.plot`: there is no metric to draw yet; train for an epoch first.")
    columns = min(3, len(groups))
    num_rows = math.ceil(len(groups) / columns)
    figure = figure_module.Figure(figsize=(4.6 * columns, 3.2 * num_rows), layout="constrained", dpi=120)
    axes = figure.subplots(num_rows, columns, squeeze=False)
    for place, (base, series) in zip(axes.flat, groups, strict=False):
        _plot_one(place, base, series)
    for place in axes.flat[len(groups) :]:
        place.set_axis_off()
    figure.savefig(os.fspath(path))


def _plot_one(axes: Any, base: str, series: Sequence[Series]) -> None:
    for each in series:
        x, y = [point[0] for point in each.points], [point[1] for point in each.points]
        marker = "o" if len(x) <= 40 else None
        axes.plot(x, y, color=COLORS[each.color % NUM_COLORS], label=each.name, marker=marker, markersize=3.5)
    axes.set_title(base, loc="left", fontsize=11, fontweight="bold", parse_math=False)
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e3e4e1")
    axes.spines[["top", "right"]].set_visible(False)
    if [each.name for each in series] != [base]:
        for text in axes.legend(frameon=False, fontsize=9).get_texts():
            text.set_parse_math(False)


def table_of(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Return the head and the cells of a table of the last epochs."""
    names = readable.metrics_of(rows)
    with_time = any("seconds" in row for row in rows)
    table = []
    for number, row in enumerate(rows, start=1):
        cells = [str(row.get("epoch", number)), *(_number(row, name) for name in names)]
        table.append([*cells, _seconds(row)] if with_time else cells)
    return ["epoch", *names, *(["time"] if with_time else [])], table[-_MOST_ROWS:]


def grouped_series(rows: Rows, metrics: Sequence[str] | None = None) -> list[tuple[str, list[Series]]]:
    """Return what each picture shows: a metric of training with its sister of validation. The learning rate is last."""
    names = readable.metrics_of(rows) if metrics is None else _checked(rows, metrics)
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: name == "lr"):
        groups.setdefault(_base(name), []).append(name)
    return [(base, [_series(name, index, rows) for index, name in enumerate(of)]) for base, of in groups.items()]


def shown_events(events: Events) -> list[GroupEvent]:
    """Return the events that changed the work: losses and resizes."""
    return [event for event in events if event.kind not in _NEVER_SHOWN]


def _in_words(rows: Rows, events: Events) -> list[str]:
    losses = sum(event.is_loss for event in events)
    told = [readable.counted(len(rows), "epoch")]
    return told + ([f"{readable.counted(losses, 'loss', 'losses')} of workers"] if losses else [])


def _series(name: str, index: int, rows: Rows) -> Series:
    color = 1 if name.startswith("val_") else 0 if index == 0 else index + 1
    points = [
        (_epoch(row, number), float(row[name]) if readable.is_real(row[name]) else math.nan)
        for number, row in enumerate(rows, start=1)
        if row.get(name) is not None
    ]
    return Series(name, points, color)


def _epoch(row: Mapping[str, Any], number: int) -> float:
    epoch = row.get("epoch")
    return float(epoch) if readable.is_real(epoch) else float(number)  # type: ignore[arg-type]


def _base(name: str) -> str:
    """Return what a metric of training and its sister of validation have in common."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def _checked(rows: Rows, metrics: Sequence[str]) -> list[str]:
    names, known = [metrics] if isinstance(metrics, str) else [*metrics], readable.names_in(rows)
    for name in names:
        if name not in known:
            raise KeyError(readable.unknown(name, known))
    return names


def _number(row: Mapping[str, Any], name: str) -> str:
    return readable.number(row[name]) if row.get(name) is not None else ""


def _seconds(row: Mapping[str, Any]) -> str:
    took = row.get("seconds")
    return readable.seconds(float(took)) if readable.is_real(took) else ""  # type: ignore[arg-type]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _at(event: GroupEvent) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event.at))


_CHART_STYLE = (
    """<style>
.raysgd-charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(240px,1fr));gap:6px 18px;margin-bottom:8px}
.raysgd-chart{font-size:12px;min-width:0;max-width:330px;margin:0}.raysgd-chart b{font-weight:600;margin-right:10px}
.raysgd-chart span{margin-right:10px;opacity:.8;white-space:nowrap}
.raysgd-chart i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:5px;background:currentColor}
.raysgd-chart svg{display:block;width:100%;height:auto}
.raysgd-chart .grid{stroke:rgba(128,128,128,.25)}.raysgd-chart text{fill:currentColor;opacity:.6;font-size:11px}
.raysgd-chart .line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}
.raysgd-chart .dot{fill:currentColor}
"""
    + "".join(f".raysgd-chart .c{index}{{color:{color}}}" for index, color in enumerate(COLORS))
    + "</style>"
)
