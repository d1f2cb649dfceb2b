"""Draws `joint-batch.svg` with the arithmetic that divides joint batches.

Run it with `python docs/images/make_joint_batch.py`.
"""

from __future__ import annotations

from pathlib import Path

from raysgd.replicas.division import Division

FOLDER = Path(__file__).parent
JOINT_SIZE, CAP = 18, 4
ROWS = ((7, "7 workers"), (3, "3 workers"), (2, "2 workers"))
LEFT, CELL, ROW, TOP, WIDTH = 150, 32, 64, 74, 760
STYLE = """
  text { font: 14px -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #24292f; }
  .title { font-size: 16px; font-weight: 600; } .note { font-size: 12px; fill: #57606a; }
  .even { fill: #3f51b5; } .odd { fill: #8c9eff; } .in { fill: #ffffff; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .note { fill: #9198a1; } .even { fill: #5c6bc0; } .odd { fill: #7f8ff4; }
  }
"""


def picture() -> str:
    """The picture, which follows the reader's choice of light or dark."""
    height = TOP + ROW * len(ROWS) + 14
    said = f"A joint batch of {JOINT_SIZE} samples on 7, 3 and 2 workers, at most {CAP} samples in a batch of a worker"
    rows = [part for index, (size, name) in enumerate(ROWS) for part in _row(TOP + index * ROW, size, name)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}">',
            f"<style>{STYLE}</style>",
            f'<text x="0" y="18" class="title">One step: {JOINT_SIZE} samples, whatever the number of workers</text>',
            f'<text x="0" y="42" class="note">BATCH_SIZE = {JOINT_SIZE}, joint_batch="constant", '
            f"max_batch_per_worker={CAP}; a gap separates batches that one worker takes one after the other</text>",
            *rows,
            "</svg>\n",
        ]
    )


def _row(top: int, world_size: int, name: str) -> list[str]:
    division = Division(JOINT_SIZE, world_size, CAP)
    found = [f'<text x="0" y="{top + 21}">{name}</text>']
    for rank in range(world_size):
        for part in division.parts(JOINT_SIZE, rank):
            x, width = LEFT + part.start * CELL, (part.stop - part.start) * CELL - 3
            kind = "odd" if rank % 2 else "even"
            found.append(f'<rect class="{kind}" x="{x}" y="{top}" width="{width}" height="32" rx="3"/>')
            found.append(f'<text class="in" x="{x + 8}" y="{top + 21}">{part.stop - part.start}</text>')
        first = division.parts(JOINT_SIZE, rank)[0].start
        found.append(f'<text class="note" x="{LEFT + first * CELL}" y="{top + 48}">worker {rank}</text>')
    return found


if __name__ == "__main__":
    (FOLDER / "joint-batch.svg").write_text(picture(), encoding="utf-8")
