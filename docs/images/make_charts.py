"""Draws the charts of `performance.md` from its tables, which the benchmarks printed.

Run it with `python docs/images/make_charts.py` after a table has changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "performance.md"
WIDTH = 760
STYLE = """
  text { font: 14px -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #24292f; }
  .title { font-size: 16px; font-weight: 600; } .note { font-size: 12px; fill: #57606a; }
  .ours { fill: #3f51b5; } .other { fill: #8c959f; } .range { stroke: #24292f; stroke-width: 1.5; }
  .grid { stroke: #d0d7de; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .note { fill: #9198a1; } .ours { fill: #7f8ff4; } .other { fill: #656c76; }
    .range { stroke: #e6edf3; } .grid { stroke: #3d444d; }
  }
"""


@dataclass(frozen=True)
class Reading:
    """A median with its range, as a cell of a table has it."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, cell: str) -> Reading:
        """The reading in a cell such as `1.10 [1.08..1.12]`."""
        number = r"(-?\d+(?:\.\d+)?)"
        found = re.match(rf"{number}(?: \[{number}\.\.{number}\])?", cell)
        if found is None:
            raise ValueError(f"performance.md has {cell!r} where a chart needs a number such as 1.10 [1.08..1.12]")
        median = float(found[1])
        return cls(median, float(found[2] or median), float(found[3] or median))


def table(header: str) -> dict[str, list[str]]:
    """The cells of a table of the page by those of its first column; `header` is how its first line begins."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n{header}")
    if not rest:
        raise ValueError(f"performance.md has no table whose first line begins with {header!r}")
    lines = [line for line in rest.partition("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def readings(header: str, names: Iterable[str], column: int = 0) -> dict[str, Reading]:
    """The readings of some rows in one column of a table."""
    rows = table(header)
    return {name: Reading.of(rows[name][column]) for name in names}


RECOVERIES = {
    "raysgd, 2 workers": "raysgd, `split_batches=True`: the other worker continues",
    "raysgd, 2 workers and a spare": "raysgd, `spare_workers=1`: the spare steps in",
    "raysgd, 4 workers": "raysgd, `split_batches=True`, four workers: the other three continue",
    "raysgd, 2 workers, waiting": "raysgd, default: the other worker waits for a new process",
    "torchft, short time-outs": "torchft 0.2.0, short time-outs",
    "torchrun": "torchrun",
    "torchft": "torchft 0.2.0, default time-outs",
    "Ray Train, poll of 0.1 s": "Ray Train, poll of 0.1 s",
    "Ray Train, its poll of 2 s": "Ray Train, default poll of 2 s",
}


def recovery() -> str:
    """How long until the next step after a kill."""
    rows = readings("| library, two workers unless noted | seconds to the next step |", RECOVERIES.values())
    return _bars(
        "A worker is killed: seconds until the next training step",
        "2 workers unless it says 4; 2 CPU cores, no GPU; medians of 5, lines are ranges; less is better",
        {name: rows[row] for name, row in RECOVERIES.items()},
        "Ray Train and torchrun repeat batches since the last checkpoint, torchft loses one. "
        "Source: examples/benchmarks/recovery.py",
    )


def startup() -> str:
    """How long until the first step."""
    names = ("raysgd", "bare Ray actors", "Ray Train")
    return _bars(
        "Start-up: seconds until the first step has ended on both workers",
        "2 workers, 2 cores; medians of 3, lines are ranges; less is better",
        readings("| library | seconds | share of Ray Train's time |", names),
        "Source: examples/benchmarks/startup.py",
    )


MODELS = ("mlp_tiny", "cnn_tiny", "mlp_large", "cnn_large")


def steady() -> str:
    """How fast the stock loop is beside a hand-written one."""
    rows = table("| model | step of the plain loop, us | speed of raysgd")
    chosen = [(name, cells[1]) for model in MODELS for name, cells in rows.items() if name.startswith(model)]
    return _dots(
        "Steady state: speed of the stock loop compared with a plain loop",
        "2 workers, 2 cores; medians of 24 pairs of epochs, lines are 95 % intervals; 1 is as fast as the plain loop",
        {re.sub(r", batch \d+", "", name): Reading.of(cell) for name, cell in chosen},
        "Source: examples/benchmarks/throughput.py",
    )


def goodput() -> str:
    """Which share of the time goes into steps that count."""
    header = "| contender, one kill each | goodput |"
    return _bars(
        "Goodput while one of two workers is killed again and again",
        "share of the time that goes into steps that count; 2 workers, 2 cores; one run of each; more is better",
        readings(header, table(header)),
        "Runs on a busy machine are left out. Source: examples/benchmarks/goodput.py",
        figure="{:.3f}",
    )


def _bars(title: str, note: str, found: dict[str, Reading], foot: str, figure: str = "{:.2g} s") -> str:
    left, row, top = max(232, 7 * max(map(len, found)) + 8), 36, 58
    scale = (WIDTH - left - 90) / max(each.most for each in found.values())
    shapes = []
    for index, (name, reading) in enumerate(found.items()):
        y = top + index * row
        length, least, most = (max(each * scale, 2) for each in (reading.median, reading.least, reading.most))
        shapes += [
            f'<text x="0" y="{y + 17}">{escape(name)}</text>',
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="24" rx="3" class="{_kind(name)}"/>',
            f'<line x1="{left + least:.1f}" x2="{left + most:.1f}" y1="{y + 12}" y2="{y + 12}" class="range"/>',
            f'<text x="{left + max(length, most) + 10:.1f}" y="{y + 17}">{figure.format(reading.median)}</text>',
        ]
    said = "; ".join(f"{name}: {figure.format(reading.median)}" for name, reading in found.items())
    return _picture(top + row * len(found) + 30, said, title, note, shapes, foot)


def _dots(title: str, note: str, found: dict[str, Reading], foot: str) -> str:
    left, row, top, right = 232, 36, 62, WIDTH - 70
    most = max(each.most for each in found.values())
    scale = (right - left) / (most - 0.9)
    bottom = top + row * len(found)

    def at(speed: float) -> float:
        return left + (speed - 0.9) * scale

    shapes = []
    for tenth in range(10, math.floor(most * 10) + 1, 2):
        x, kind = at(tenth / 10), "range" if tenth == 10 else "grid"
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom}" class="{kind}"/>')
        shapes.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" class="note">{tenth / 10:g}</text>')
    for index, (name, reading) in enumerate(found.items()):
        y = top + index * row + 14
        shapes += [
            f'<text x="0" y="{y + 5}">{escape(name)}</text>',
            f'<line x1="{at(reading.least):.1f}" x2="{at(reading.most):.1f}" y1="{y}" y2="{y}" class="range"/>',
            f'<circle cx="{at(reading.median):.1f}" cy="{y}" r="6" class="ours"/>',
            f'<text x="{at(reading.most) + 10:.1f}" y="{y + 5}">{reading.median:.3g}</text>',
        ]
    said = "; ".join(f"{name}: {reading.median:.3g} times as fast as a plain loop" for name, reading in found.items())
    return _picture(bottom + 46, said, title, note, shapes, foot)


def _kind(name: str) -> str:
    return "ours" if name.startswith("raysgd") else "other"


def _picture(height: int, said: str, title: str, note: str, shapes: list[str], foot: str) -> str:
    """A picture with a title above and its source below, which follows the reader's choice of light or dark."""
    box = f'viewBox="0 0 {WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{escape(said)}">',
            f"<style>{STYLE}</style>",
            f'<text x="0" y="18" class="title">{escape(title)}</text>',
            f'<text x="0" y="40" class="note">{escape(note)}</text>',
            *shapes,
            f'<text x="0" y="{height - 8}" class="note">{escape(foot)}</text>',
            "</svg>\n",
        ]
    )


CHARTS: dict[str, Callable[[], str]] = {
    "goodput.svg": goodput,
    "recovery.svg": recovery,
    "startup.svg": startup,
    "steady.svg": steady,
}


if __name__ == "__main__":
    for name, draw in CHARTS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
