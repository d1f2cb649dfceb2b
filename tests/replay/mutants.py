"""Journals that were changed at random, and what the commands must do with them: refuse them, or do no harm.

The number of a mutant repeats it: `python -m tests.replay.mutants 4711` shows what the commands say of it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from raysgd.callbacks import Checkpointing
from raysgd.cli.main import main
from raysgd.journal.entries import CHECKPOINT, GAP
from raysgd.journal.journal import Journal, JournalWriter
from raysgd.torch import TorchTrainer
from tests.journal.made import DATA, HEADER, leg_line
from tests.journal.test_steps import write
from tests.replay.programs import Plain

EARLIER = Path(__file__).parents[1] / "earlier_files" / "files" / "journals"
SECONDS = 60  # of one mutant
REPLAYED_EVERY = 10


class Deaf(Plain):
    """Trains without the config, which may hold anything."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({})

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


PROGRAM = f"{__file__}:Deaf"


def write_honest(folder: Path) -> list[Path]:
    """Write runs whose journals are changed. The first has a checkpoint, and can be replayed with `PROGRAM`."""
    with TorchTrainer(training_operator_cls=Deaf, use_local=True, seed=2, config={"lr": 0.1, "rates": [1]}) as trainer:
        trainer.fit(2, folder=folder / "replayed", callbacks=[Checkpointing(keep_last=None)], progress=False)
    for run in ("dataset", "stream"):
        shutil.copytree(EARLIER / run, folder / run)
    writer = JournalWriter(folder / "workers", HEADER)
    rule = {"cap": 3, "num_shards": 4, "multiple": 2}
    for number, after in enumerate((0, 600, 620)):
        data = {**DATA, "order": "shuffled", "num_samples": 4000, "rule": rule if number else None}
        writer.begin_leg(leg_line(after, consumed=after * 2, num_workers=3, window=2, data=data))
        write(folder / "workers" / "journal", range(after + 2, 640, 2))
        writer.note(CHECKPOINT, step=after + 2, location="checkpoints/a.ckpt")
        writer.note(GAP, first_step=after + 3, last_step=after + 5)
    return [folder / name for name in ("replayed", "dataset", "stream", "workers")]


NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 64, 10_000, 2**24, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400),
    *(0.5, -1.0, 1e308, float("nan"), float("inf"), 1e16),
    *(
        "",
        "x",
        "0",
        "../../etc/passwd",
        "/dev/zero",
        "gs://host/x?endpoint_override=host&scheme=http",
        "file:///etc/passwd",
    ),
    *("a\0b", "\x1b[2J\x1b]0;owned\x07", "a\nb", "\ud800", "x" * 100_000, "sequential", "shuffled", "stream", "apex"),
    *([], {}, [0], [[0, 0, 0, 0]] * 64, [[0] * 4] * 3, {"kind": "stream"}, {"cap": 1, "num_shards": 1, "multiple": 1}),
    *({"backend": "x", "options": {"cpp.cxx": [None, "x"]}}, json.loads("[" * 400 + "]" * 400)),
)


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a value with the key of each entry."""
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(each, dict | list):
            yield from places_in(each)


def near(chance: random.Random, value: Any) -> Any:
    """Return a value that could stand there as well."""
    if isinstance(value, bool) or value is None:
        return chance.choice((True, False, None, 1, 2))
    if isinstance(value, int | float):
        return chance.choice((value + 1, value - 1, value * 2, value + chance.randrange(1000)))
    return chance.choice(NASTY) if isinstance(value, str) else value


def change_lines(chance: random.Random, path: Path) -> None:
    """Change entries or the order of the lines."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(lines))
        container, key = chance.choice([*places_in(lines[at])] or [(lines, at)])
        kind = chance.random()
        if kind < 0.4:
            container[key] = near(chance, container[key])
        elif kind < 0.7:
            container[key] = copy.deepcopy(chance.choice(NASTY))
        elif kind < 0.8:
            del container[key]
        elif kind < 0.85:
            lines[at] = copy.deepcopy(chance.choice(NASTY))
        elif kind < 0.9:
            lines.insert(chance.randrange(len(lines)), copy.deepcopy(lines[at]))
        elif kind < 0.95 and len(lines) > 1:
            del lines[at]
        else:
            chance.shuffle(lines)
        lines = [each if isinstance(each, dict) else {"kind": each} for each in lines]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def change_bytes(chance: random.Random, path: Path) -> None:
    """Change, remove or add bytes."""
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 3, 20))):
        at, kind = chance.randrange(len(content) + 1), chance.randrange(4)
        if kind == 0 and at < len(content):
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del content[at : at + chance.choice((1, 16, 400))]
        elif kind == 2:
            content[at:at] = chance.randbytes(chance.choice((1, 16, 400)))
        elif chance.random() < 0.2:
            del content[at:]
    path.write_bytes(content)


def change(chance: random.Random, folder: Path) -> None:
    """Change the journal in the folder of a run."""
    path = chance.choice([*sorted((folder / "journal").iterdir()), folder / "journal" / "journal.jsonl"])
    kind = chance.random()
    if kind < 0.03:
        path.unlink()
    elif kind < 0.7 and path.suffix == ".jsonl":
        change_lines(chance, path)
    else:
        change_bytes(chance, path)


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def ask(number: int, honest: Path, mutant: Path, show: Callable[[str], object] = lambda text: None) -> list[bool]:
    """Let the commands read a mutant. Return for each of them whether it refused.

    Raises:
        AssertionError: A command raised an error that is not one of the library's, took too long, showed what moves
            the cursor of a terminal, or changed a file.
    """
    chance, before, refused = random.Random(-number), content_of(mutant), list[bool]()
    step, program = chance.randrange(25), ["--program", PROGRAM]
    commands: list[list[Any]] = [
        ["why", mutant, "--jumps"],
        ["why", mutant, "--step", step],
        ["bisect", mutant, honest],
    ]
    if number % REPLAYED_EVERY == 0:
        commands += [
            ["replay", mutant, "--step", step, *program],
            ["why", mutant, "--step", step, "--recompute", *program],
        ]
    for command in commands:
        with in_time():
            found = CliRunner().invoke(main, [str(each) for each in command])
        show(f"{command[0]}: {found.output or found.exception!r}")
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise AssertionError(f"mutant {number}, `{command[0]}`") from found.exception
        wrong = {character for line in found.output.split("\n") for character in line if not character.isprintable()}
        assert not wrong, f"mutant {number}, `{command[0]}`"
        refused.append(found.exit_code != 0)
    assert content_of(mutant) == before, f"mutant {number}: a file was changed"
    return refused


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


def mutant_of(number: int, honest: list[Path], folder: Path) -> tuple[Path, Path]:
    """Return the honest run and the mutant with this number."""
    chance = random.Random(number)
    chosen = honest[0] if number % REPLAYED_EVERY == 0 else chance.choice(honest)
    mutant = Path(shutil.copytree(chosen, folder / "mutant"))
    change(chance, mutant)
    return chosen, mutant


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        runs = write_honest(Path(temporary, "honest"))
        assert [Journal(each).last_step for each in runs] == [20, 20, 12, 638]
        ask(int(sys.argv[1]), *mutant_of(int(sys.argv[1]), runs, Path(temporary)), show=print)
