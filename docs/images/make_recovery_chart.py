"""Draws `recovery.svg` from the table in `performance.md` that the benchmark printed.

Run it with `python docs/images/make_recovery_chart.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "performance.md"
ROWS = {
    "raysgd, continuing with the survivor (`resize_check_s`)": "raysgd, on the worker that is left",
    "raysgd, with a spare": "raysgd, with a spare worker",
    "raysgd, waiting for a new process": "raysgd, with a new process",
    "torchrun": "torchrun",
    "Ray Train": "Ray Train",
}
LEFT, WIDTH, HEIGHT, ROW, TOP = 232, 760, 268, 36, 58
STYLE = """
  text { font: 14px -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #24292f; }
  .title { font-size: 16px; font-weight: 600; } .note { font-size: 12px; fill: #57606a; }
  .ours { fill: #3f51b5; } .other { fill: #8c959f; } .range { stroke: #24292f; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .note { fill: #9198a1; } .ours { fill: #7f8ff4; } .other { fill: #656c76; }
    .range { stroke: #e6edf3; }
  }
"""


def figures() -> dict[str, tuple[float, float, float]]:
    """Median, least and most of each contender."""
    number = r"(\d+\.\d+)"
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        samples = re.match(rf"{number} \[{number}\.\.{number}\]", cells[1]) if len(cells) > 4 else None
        if samples and cells[0] in ROWS:
            found[cells[0]] = tuple(float(each) for each in samples.groups())
    return {name: found[name] for name in ROWS}  # type: ignore[misc]


def chart() -> str:
    """The picture, which follows the reader's choice of light or dark."""
    found = figures()
    scale = (WIDTH - LEFT - 90) / max(most for _, _, most in found.values())
    bars = [_bar(index, name, samples, scale) for index, (name, samples) in enumerate(found.items())]
    said = "; ".join(f"{ROWS[name]}: {median:.2g} s" for name, (median, _, _) in found.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">',
            f"<style>{STYLE}</style>",
            '<text x="0" y="18" class="title">A worker is killed: seconds until the next training step</text>',
            '<text x="0" y="40" class="note">2 workers, 2 cores; medians of 5, lines are ranges; less is better</text>',
            *bars,
            f'<text x="0" y="{HEIGHT - 8}" class="note">Ray Train and torchrun go back to the last checkpoint; '
            "raysgd repeats no batch. Source: examples/benchmarks/recovery.py</text>",
            "</svg>\n",
        ]
    )


def _bar(index: int, name: str, samples: tuple[float, float, float], scale: float) -> str:
    median, least, most = (each * scale for each in samples)
    y = TOP + index * ROW
    kind = "ours" if name.startswith("raysgd") else "other"
    return (
        f'<text x="0" y="{y + 17}">{ROWS[name]}</text>'
        f'<rect x="{LEFT}" y="{y}" width="{max(median, 2):.1f}" height="24" rx="3" class="{kind}"/>'
        f'<line x1="{LEFT + least:.1f}" x2="{LEFT + most:.1f}" y1="{y + 12}" y2="{y + 12}" class="range"/>'
        f'<text x="{LEFT + max(median, most) + 10:.1f}" y="{y + 17}">{samples[0]:.2g} s</text>'
    )


if __name__ == "__main__":
    (FOLDER / "recovery.svg").write_text(chart(), encoding="utf-8")
