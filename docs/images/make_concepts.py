"""Draws the pictures of what runs where, of a loss and of a pass: `parts.svg`, `loss.svg` and `pass.svg`.

Run it with `python docs/images/make_concepts.py`. The samples in `pass.svg` are divided by the library itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH = 760
STYLE = """
  text { font: 14px -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #24292f; }
  .small { font-size: 12px; fill: #57606a; } .bold { font-weight: 600; } .inside { fill: #ffffff; font-size: 13px; }
  .box { fill: #f6f8fa; stroke: #8c959f; } .driver { fill: #e8eaf6; stroke: #3f51b5; } .line { stroke: #8c959f; }
  .ours { fill: #3f51b5; } .ring { stroke: #3f51b5; stroke-width: 2; } .gone { fill: #c62828; } .wait { fill: #8c959f; }
  .a { fill: #3f51b5; } .b { fill: #00796b; } .c { fill: #8e5a00; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9198a1; } .box { fill: #161b22; stroke: #656c76; }
    .driver { fill: #1a2050; stroke: #7f8ff4; } .ring { stroke: #7f8ff4; } .inside { fill: #ffffff; }
  }
"""
NUM_SAMPLES, BATCH_SIZE, BEFORE, AFTER = 22, 3, 3, 2
"""Of the pass in `pass.svg`: how many workers there are before a failure and after it."""


def parts() -> str:
    """Who is who: driver, trainer, workers, operators, and what connects them."""
    boxes = [
        _box(0, 0, WIDTH, 126, "driver", "driver: your program", "bold"),
        _box(16, 40, 220, 70, "box", "trainer", note="TorchTrainer, TFTrainer, Trainer"),
        _box(270, 40, 220, 70, "box", "recovery", note="runs calls again after a failure"),
        _box(524, 40, 220, 70, "box", "snapshot", note="the state after the last call"),
    ]
    for index in range(3):
        x = index * 262
        name = f"worker {index}" if index < 2 else "spare worker"
        boxes += [
            _box(x, 200, 236, 122, "box", name, "bold"),
            _box(x + 14, 234, 208, 74, "driver", "your operator", note="model, optimizer, data"),
            f'<line x1="{x + 118}" y1="126" x2="{x + 118}" y2="200" class="line" stroke-dasharray="4 3"/>',
        ]
    lines = [
        '<line x1="236" y1="272" x2="262" y2="272" class="ring"/>',
        _text(130, 158, "calls, answers, heartbeats: through Ray", "small"),
        _text(WIDTH // 2 - 252, 344, "gradients: from worker to worker, over a process group", "small"),
        _text(524, 344, "ready, outside of the group", "small"),
    ]
    return _picture(
        356, "The driver holds the trainer and the snapshot. Each worker holds your operator.", [*boxes, *lines]
    )


def loss() -> str:
    """What happens when a worker dies, step by step."""
    rows = {"worker 0": 0, "worker 1": 1, "worker 2": 2, "spare": 3}
    left, unit, height = 84, 84, 34
    steps = {"worker 0": "okrjoo", "worker 1": "ox", "worker 2": "okrjoo", "spare": "wwwjoo"}
    kinds = {
        "o": ("ours", ("step 41", "step 42", "step 43")),
        "k": ("wait", ("waits",)),
        "x": ("gone", ("killed",)),
        "r": ("wait", ("leaves",)),
        "j": ("b", ("joins",)),
        "w": ("box", ("ready",)),
    }
    shapes = []
    for name, row in rows.items():
        y = 40 + row * (height + 12)
        shapes.append(_text(0, y + 22, name, "bold"))
        done = 0 if name != "spare" else 1
        for place, kind in enumerate(steps[name]):
            style, words = kinds[kind]
            word = words[min(done, len(words) - 1)] if kind == "o" else words[0]
            done += kind == "o"
            x = left + place * (unit + 28)
            shapes.append(f'<rect x="{x}" y="{y}" width="{unit + 16}" height="{height}" rx="4" class="{style}"/>')
            shapes.append(_text(x + unit // 2 + 8, y + 22, word, "" if kind == "w" else "inside", anchor="middle"))
    notes = ["", "step 42 fails", "settle, compare", "form a new group", "repeat step 42", ""]
    shapes += [
        _text(left + i * (unit + 28) + unit // 2 + 8, 24, note, "small", "middle") for i, note in enumerate(notes)
    ]
    return _picture(232, "Worker 1 is killed in step 42. A spare takes its place; step 42 is repeated.", shapes)


def divided() -> list[list[list[int]]]:
    """The samples of each worker in each step: two steps of three workers, the second of which fails, then of two."""
    first = _steps(range(NUM_SAMPLES), BEFORE)[:2]
    used = sum(len(batch) for batch in first[0])
    return [*first, *_steps(range(used, NUM_SAMPLES), AFTER)]


def one_pass() -> str:
    """How the samples of a pass are divided, before and after a failure."""
    left, cell, height = 150, 26, 28
    shapes = [
        _text(left, 22, f"a pass over {NUM_SAMPLES} samples, batch size {BATCH_SIZE}; numbers are samples", "small")
    ]
    names = ["step 1, 3 workers", "step 2, lost", *(f"step {n}, 2 workers" for n in (2, 3, 4))]
    for row, (name, batches) in enumerate(zip(names, divided(), strict=True)):
        y = 36 + row * (height + 10)
        shapes.append(_text(0, y + 19, name))
        for rank, batch in enumerate(batches):
            kind = "wait" if row == 1 else "abc"[rank]
            for sample in batch:
                x = left + sample * cell
                shapes.append(f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{height}" rx="3" class="{kind}"/>')
                shapes.append(_text(x + cell // 2 - 1, y + 19, str(sample), "inside", "middle"))
    y = 36 + len(names) * (height + 10) + 14
    for rank in range(BEFORE):
        shapes.append(f'<rect x="{left + rank * 110}" y="{y - 11}" width="12" height="12" class="{"abc"[rank]}"/>')
        shapes.append(_text(left + rank * 110 + 18, y, f"worker {rank}", "small"))
    shapes.append(_text(left + 330, y, "grey: computed, not counted, repeated", "small"))
    return _picture(y + 14, "Each step takes the next samples of the pass, and each worker a part of them.", shapes)


def _steps(samples: range, num_workers: int) -> list[list[list[int]]]:
    """What the library gives each worker in each step."""
    from torch.utils.data import DataLoader

    from raysgd.torch.data.sampling import shard_loader

    of_workers = []
    for rank in range(num_workers):
        loader = DataLoader(samples, batch_size=BATCH_SIZE)  # type: ignore[arg-type]
        sharded = shard_loader(loader, rank=rank, world_size=num_workers, training=True)
        sharded.sampler.plan_pass(0, seed=0)  # type: ignore[union-attr]
        of_workers.append([batch.tolist() for batch in sharded.loader])  # type: ignore[union-attr]
    steps = [list(step) for step in zip(*of_workers, strict=True)]
    return [[batch for batch, seen in zip(step, _seen_before(step), strict=True) if not seen] for step in steps]


def _seen_before(batches: list[list[int]]) -> Iterator[bool]:
    """Whether a batch only repeats samples of another one, with weight 0."""
    known: set[int] = set()
    for batch in batches:
        yield bool(known & set(batch))
        known |= set(batch)


def _box(x: int, y: int, width: int, height: int, kind: str, name: str, style: str = "", note: str = "") -> str:
    box = f'<rect x="{x + 1}" y="{y + 1}" width="{width - 2}" height="{height - 2}" rx="6" class="{kind}"/>'
    return box + _text(x + 16, y + 26, name, style) + (_text(x + 16, y + 48, note, "small") if note else "")


def _text(x: int, y: int, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>' if words else ""


def _picture(height: int, said: str, shapes: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *filter(None, shapes), "</svg>\n"])


PICTURES = {"parts.svg": parts, "loss.svg": loss, "pass.svg": one_pass}


if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (FOLDER / file).write_text(draw(), encoding="utf-8")
