"""Pure: numbers -> SVG. Lines over epochs, and what happened when; colors come from the page around them.

A page gives the classes their colors: `c0` to `c5` for series, `grid`, `axis`, `ink`, and for the time line the kinds
of calls (`train`, `validation`, `test`, `other`), of lost time (`bad`) and of events (`bad`, `change`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raysgd._text.cards import safe
from raysgd.history import readable

NUM_COLORS = 6

_CHART_SIZE = 360, 210
_TIME_LINE_WIDTH = 1080

_LARGEST = 1e100
_MOST_DOTS = 200
_MOST_POINTS = 600
_STEPS = (1, 2, 2.5, 5, 10)
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


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
