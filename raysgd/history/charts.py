"""Views of a history: as text, as a card of HTML, and as charts in SVG. Lines over epochs, and what happened when.

Colors come from the page around a chart, which gives the classes theirs: `c0` to `c5` for series, `grid`, `axis`,
`ink`, and for the time line the kinds of calls (`train`, `validation`, `test`, `other`), of lost time (`bad`) and of
events (`bad`, `change`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd._imports import require
from raysgd._text import cards
from raysgd._text.cards import safe
from raysgd.engine.shared.group_events import GroupEvent
from raysgd.history import readable

Rows = Sequence[Mapping[str, Any]]
Events = Sequence[GroupEvent]

COLORS = ("#2a78d6", "#e0662f", "#1a9a6c", "#c08a00", "#d0568a", "#7463d4")
"""Of lines: they can be told apart on light and on dark ground."""

_PREFIXES = ("train_", "val_")
_MOST_ROWS = 20
_MOST_CHARTS = 6
_NEVER_SHOWN = ("started", "restarted")
NUM_COLORS = 6
_CHART_SIZE = 360, 210
_TIME_LINE_WIDTH = 1080
_LARGEST = 1e100
_MOST_DOTS = 200
_MOST_POINTS = 600
_STEPS = (1, 2, 2.5, 5, 10)
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


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
    """Return the events that changed the work: failures and resizes."""
    return [event for event in events if event.kind not in _NEVER_SHOWN]


def _in_words(rows: Rows, events: Events) -> list[str]:
    return [readable.counted(len(rows), "epoch"), *readable.failures(events)]


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


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: What it shows.
        points: Its points; those that are not finite leave a gap.
        color: Which color it has, from 0.
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0


@dataclass(frozen=True)
class Span:
    """Something that took time: seconds from the beginning, what kind it was, and what to tell of it."""

    begin: float
    end: float
    kind: str
    told: str
    level: float | None = None


@dataclass(frozen=True)
class Mark:
    """Something that happened at one time, with the number that a table gives it."""

    at: float
    kind: str
    number: int
    told: str


@dataclass(frozen=True)
class Axis:
    """Values -> places between two pixels."""

    low: float
    high: float
    first: float
    last: float

    def place(self, value: float) -> str:
        """Return where a value is, in pixels."""
        share = (value - self.low) / (self.high - self.low)
        return f"{self.first + share * (self.last - self.first):.1f}"


def figure(base: str, series: Sequence[Series], kind: str) -> str:
    """A line chart below its name, and below the names of its lines where these are others; a figure of this class."""
    keys = "" if [each.name for each in series] == [base] else "".join(map(_key, series))
    caption = f"<figcaption><b>{safe(base)}</b>{keys}</figcaption>"
    return f'<figure class="{kind}">{caption}{line_chart(series)}</figure>'


def _key(series: Series) -> str:
    return f'<span class="key"><i class="c{series.color % NUM_COLORS}"></i>{safe(series.name)}</span>'


def line_chart(series: Sequence[Series]) -> str:
    """Draw lines over epochs."""
    width, height = _CHART_SIZE
    points = [point for each in series for point in each.points if _can_be_drawn(point)]
    if not points:
        return '<p class="nothing">no finite values yet</p>'
    ticks_y = nice_ticks(min(y for _, y in points), max(y for _, y in points))
    labels = [_tick(value, ticks_y) for value in ticks_y]
    left = 14 + 6.6 * max(map(len, labels))
    ticks_x = whole_ticks(min(x for x, _ in points), max(x for x, _ in points))
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    x = Axis(x_low - (x_low == x_high), x_high + (x_low == x_high), left + 6, width - 12)
    y = Axis(ticks_y[0], ticks_y[-1], height - 38, 10)
    parts = [
        f'<line class="grid" x1="{left:.1f}" x2="{width - 6}" y1="{y.place(value)}" y2="{y.place(value)}"/>'
        f'<text class="ink" x="{left - 6:.1f}" y="{y.place(value)}" dy="0.35em" text-anchor="end">{label}</text>'
        for value, label in zip(ticks_y, labels, strict=True)
    ]
    parts += [
        f'<text class="ink" x="{x.place(value)}" y="{height - 20}" text-anchor="middle">{value:g}</text>'
        for value in ticks_x
    ]
    parts.append(f'<text class="ink" x="{(left + width) / 2:.0f}" y="{height - 4}" text-anchor="middle">epoch</text>')
    parts += [_line(each, x, y) for each in series]
    told = ", ".join(each.name for each in series)
    return _svg(width, height, f"{told} by epoch", parts)


def _line(series: Series, x: Axis, y: Axis) -> str:
    color = f"c{series.color % NUM_COLORS}"
    runs: list[list[tuple[float, float]]] = [[]]
    for point in series.points:
        if _can_be_drawn(point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    parts = []
    for run in runs:
        where = " ".join(f"{x.place(px)},{y.place(py)}" for px, py in thinned(run))
        parts.append(f'<polyline class="line {color}" points="{where}"/>' if len(run) > 1 else "")
    if len(series.points) > _MOST_DOTS:
        return "".join(parts) + f"<title>{safe(series.name)}</title>"
    radius = 3 if len(series.points) <= 40 else 1.5
    for px, py in (point for run in runs for point in run):
        told = f"{series.name} = {readable.number(float(py))} at epoch {px:g}"
        parts.append(
            f'<circle class="dot {color}" cx="{x.place(px)}" cy="{y.place(py)}" r="{radius}">'
            f"<title>{safe(told)}</title></circle>"
        )
    return "".join(parts)


def time_line(spans: Sequence[Span], marks: Sequence[Mark], workers: Sequence[tuple[float, int]]) -> str:
    """Return what ran when, how fast it was, how many workers were at work, and what happened to them.

    Args:
        spans: The calls; those with a level are drawn at their height in the lane of the throughput.
        marks: The events.
        workers: From which second on how many workers were at work.
    """
    end = max([span.end for span in spans] + [mark.at for mark in marks] + [1e-3])
    lanes = _Lanes(Axis(0.0, end, 92.0, _TIME_LINE_WIDTH - 14.0))
    marks_height = 26.0 if marks else 4.0
    parts = [lanes.calls(spans, marks_height)]
    top = marks_height + 34
    top, part = lanes.throughput(spans, top)
    parts.append(part)
    top, part = lanes.workers(workers, top, end)
    parts.append(part)
    parts.append(lanes.times(end, top))
    parts += [lanes.mark(mark, top) for mark in marks]
    return _svg(_TIME_LINE_WIDTH, int(top + 24), "what happened when", parts)


class _Lanes:
    """The lanes of a time line, one below the other."""

    def __init__(self, x: Axis) -> None:
        self._x = x

    def calls(self, spans: Sequence[Span], top: float) -> str:
        bars = [
            f'<rect class="{safe(span.kind)}" x="{self._x.place(span.begin)}" y="{top}" height="22" rx="1" '
            f'width="{max(1.0, float(self._x.place(span.end)) - float(self._x.place(span.begin)) - 0.5):.1f}">'
            f"<title>{safe(span.told)}</title></rect>"
            for span in spans
        ]
        return self._name("calls", top + 11) + "".join(bars)

    def throughput(self, spans: Sequence[Span], top: float) -> tuple[float, str]:
        levels = [span for span in spans if span.level is not None]
        if not levels:
            return top, ""
        highest = nice_ticks(0.0, max(span.level or 0.0 for span in levels))[-1]
        y = Axis(0.0, highest, top + 64, top + 8)
        parts = [self._name("samples/s", top + 36), self._rule(y, 0.0), self._rule(y, highest)]
        for span in levels:
            place = y.place(span.level or 0.0)
            parts.append(
                f'<line class="level" x1="{self._x.place(span.begin)}" x2="{self._x.place(span.end)}" y1="{place}" '
                f'y2="{place}"><title>{safe(span.told)}</title></line>'
            )
        return top + 76, "".join(parts)

    def workers(self, workers: Sequence[tuple[float, int]], top: float, end: float) -> tuple[float, str]:
        if not workers:
            return top, ""
        y = Axis(0.0, max(max(count for _, count in workers), 1), top + 48, top + 8)
        path = "".join(
            f"{'H' if index else 'M'}{self._x.place(at)}{f'V{y.place(count)}' if index else f',{y.place(count)}'}"
            for index, (at, count) in enumerate(workers)
        )
        path += f"H{self._x.place(end)}"
        parts = [self._name("at work", top + 28), self._rule(y, 0.0), self._rule(y, y.high)]
        return top + 58, "".join(parts) + f'<path class="level" d="{path}"/>'

    def times(self, end: float, top: float) -> str:
        parts = [f'<line class="axis" x1="{self._x.first}" x2="{self._x.last}" y1="{top}" y2="{top}"/>']
        for value in time_ticks(end):
            place = self._x.place(value)
            parts.append(
                f'<line class="axis" x1="{place}" x2="{place}" y1="{top}" y2="{top + 4}"/>'
                f'<text class="ink" x="{place}" y="{top + 18}" text-anchor="middle">{_clock(value)}</text>'
            )
        return "".join(parts)

    def mark(self, mark: Mark, bottom: float) -> str:
        place = self._x.place(mark.at)
        return (
            f'<g class="mark {safe(mark.kind)}"><title>{safe(mark.told)}</title>'
            f'<line x1="{place}" x2="{place}" y1="18" y2="{bottom}"/><circle cx="{place}" cy="10" r="8.5"/>'
            f'<text x="{place}" y="10" dy="0.36em" text-anchor="middle">{mark.number}</text></g>'
        )

    def _name(self, text: str, y: float) -> str:
        return f'<text class="name" x="0" y="{y}" dy="0.35em">{text}</text>'

    def _rule(self, y: Axis, value: float) -> str:
        place = y.place(value)
        text = f'x="{self._x.first - 6}" y="{place}" dy="0.35em" text-anchor="end">{_short(value)}</text>'
        rule = f'x1="{self._x.first}" x2="{self._x.last}" y1="{place}" y2="{place}"/>'
        return f'<line class="grid" {rule}<text class="ink" {text}'


def _can_be_drawn(point: tuple[float, float]) -> bool:
    return all(abs(value) <= _LARGEST for value in point)  # NaN is not


def _svg(width: int, height: int, told: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{safe(told)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """Keeps as many points as can be told apart: of neighbors that are too many, the lowest and the highest.

    Examples:
        >>> thinned([(0, 1), (1, 5), (2, 0), (3, 2), (4, 9), (5, 3), (6, 4), (7, 4)], most=4)
        [(1, 5), (2, 0), (4, 9), (5, 3)]
    """
    if len(points) <= most:
        return [*points]
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        some = points[begin : begin + size]
        kept += sorted({min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])})
    return kept


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values that enclose a range.

    Examples:
        >>> nice_ticks(0.13, 0.87), nice_ticks(2, 2), nice_ticks(0, 4321, 3)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1.0, 1.5, 2.0, 2.5, 3.0], [0.0, 2500.0, 5000.0])
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    step = _round_step((high - low) / max(1, count - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def whole_ticks(low: float, high: float) -> list[float]:
    """Return at most about 8 whole values inside a range.

    Examples:
        >>> whole_ticks(1, 4), whole_ticks(1, 30)
        ([1, 2, 3, 4], [5, 10, 15, 20, 25, 30])
    """
    step = max(1, math.ceil(_round_step((high - low) / 8))) if high > low else 1
    return [value for value in range(math.ceil(low), math.floor(high) + 1) if not value % step]


def time_ticks(end: float) -> list[float]:
    """Return at most about 9 round moments from 0 to `end` seconds."""
    if end < 4:
        return [value for value in nice_ticks(0.0, end, 6) if value <= end]
    step = next((each for each in _TIME_STEPS if end / each <= 9), 86400.0 * math.ceil(end / 86400 / 9))
    return [index * float(step) for index in range(int(end / step) + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))


def _tick(value: float, ticks: Sequence[float]) -> str:
    """A tick, with the digits that tell it from its neighbors."""
    largest = max(abs(each) for each in ticks)
    if largest >= 1e5 or largest < 1e-3:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9)) + (f"{ticks[1] - ticks[0]:e}"[:3] == "2.5")
    return f"{value:.{digits}f}"


def _short(value: float) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def _clock(value: float) -> str:
    """A moment, counted from the beginning."""
    if (value < 120 and value == int(value)) or value < 4:
        return f"{value:g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"
