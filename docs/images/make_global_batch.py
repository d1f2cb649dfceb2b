"""Draws `global-batch.svg` and `logical-shards.svg` with the arithmetic that divides global batches.

Run it with `python docs/images/make_global_batch.py`.
"""

from __future__ import annotations

from pathlib import Path

from raysgd.core.arrays.division import Division, ShardedGlobalBatch

FOLDER = Path(__file__).parent
JOINT_SIZE, CAP = 18, 4
ROWS = ((7, "7 workers"), (3, "3 workers"), (2, "2 workers"))
LEFT, CELL, ROW, TOP, WIDTH = 150, 32, 64, 74, 760
STYLE = """
  text { font: 14px -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #24292f; }
  .title { font-size: 16px; font-weight: 600; } .note { font-size: 12px; fill: #57606a; }
  .even { fill: #3f51b5; } .odd { fill: #6573d6; } .in { fill: #ffffff; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .note { fill: #9198a1; } .even { fill: #5c6bc0; } .odd { fill: #7784e0; }
  }
"""


def picture() -> str:
    """The picture, which follows the reader's choice of light or dark."""
    height = TOP + ROW * len(ROWS) + 14
    said = f"A global batch of {JOINT_SIZE} samples on 7, 3 and 2 workers, at most {CAP} samples in a batch of a worker"
    rows = [part for index, (size, name) in enumerate(ROWS) for part in _row(TOP + index * ROW, size, name)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}">',
            f"<style>{STYLE}</style>",
            f'<text x="0" y="18" class="title">One step: {JOINT_SIZE} samples, whatever the number of workers</text>',
            f'<text x="0" y="42" class="note">BATCH_SIZE = {JOINT_SIZE}, split_batches=True, '
            f"micro_batch_size={CAP}; a gap separates batches that one worker takes one after the other</text>",
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


SHARD_ROWS = ((4, "4 workers"), (3, "3 workers, one lost"), (1, "1 worker, three lost"))
NUM_SHARDS, SHARD_WIDTH, SHARDS_LEFT = 4, 110, 180


def shards_picture() -> str:
    """Which worker computes which shard, and the one order of the sum."""
    height = TOP + ROW * len(SHARD_ROWS) + 40
    said = "Four logical shards on 4, 3 and 1 workers; their gradients are added in the same order"
    rows = []
    for index, (world_size, name) in enumerate(SHARD_ROWS):
        top = TOP - 10 + index * ROW
        rows.append(f'<text x="0" y="{top + 21}">{name}</text>')
        for rank in range(world_size):
            for part in ShardedGlobalBatch(NUM_SHARDS, world_size, num_shards=NUM_SHARDS).parts(NUM_SHARDS, rank):
                x, kind = SHARDS_LEFT + part.start * SHARD_WIDTH, "odd" if rank % 2 else "even"
                rows.append(f'<rect class="{kind}" x="{x}" y="{top}" width="{SHARD_WIDTH - 4}" height="32" rx="3"/>')
                rows.append(f'<text class="in" x="{x + 8}" y="{top + 21}">shard {part.start}, worker {rank}</text>')
    total = "gradient  =  ((g0 + g1) + g2) + g3,  to the same bits"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}">',
            f"<style>{STYLE}</style>",
            '<text x="0" y="18" class="title">Fixed shards, whichever worker computes them</text>',
            '<text x="0" y="42" class="note">deterministic=True, num_workers=4</text>',
            *rows,
            f'<text x="{SHARDS_LEFT}" y="{height - 18}">{total}</text>',
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    (FOLDER / "logical-shards.svg").write_text(shards_picture(), encoding="utf-8")
    (FOLDER / "global-batch.svg").write_text(picture(), encoding="utf-8")
