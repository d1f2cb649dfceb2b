"""Writes what came of fixed programs, idioms and drawn programs to the last bit, so that two versions can be compared.

    python -m tests.recordings FOLDER --only fixed idioms counts
    diff -r BEFORE AFTER

Each line is one run: its name, what the calls returned, the weights, what followed a death, and for fixed programs the
order of events in each worker. What is not determined, such as seconds, is left out; `--times 2` runs each twice and
says which runs differ from themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from raysgd import Recovery
from raysgd.testing import kill_worker
from raysgd.torch import TorchTrainer
from tests.programs.kinds import KINDS
from tests.programs.outcomes import Outcome
from tests.programs.running import laboratory
from tests.recordings import seams
from tests.recordings.fixed import PROGRAMS, Program

NUM_PROGRAMS = 40
"""Of each kind that is drawn."""


def recorded(program: Program) -> str:
    """Run a fixed program on two workers, and return what came of it, in a line."""
    outcome, lines = Outcome(), list[str]()
    recovery = Recovery(wait_for_workers=False, resize_interval_s=600.0, snapshot_every_s=0)
    try:
        with TorchTrainer(
            training_operator_cls=program.operator,
            num_workers=2,
            num_cpus_per_worker=0.5,
            recovery=recovery,
            scheduler_step_freq="batch",
            **program.options,
        ) as trainer:
            if program.callbacks:
                outcome.rows += map(dict, trainer.fit(3, callbacks=[*program.callbacks]))
            for call in range(0 if program.callbacks else 3):
                if call == 1 and program.kill is not None:
                    kill_worker(trainer, program.kill[0], at=f"step:{program.kill[1]}")
                if call == 1 and program.between is not None:
                    trainer.apply_all_operators(program.between)
                outcome.rows += [dict(trainer.train()), dict(trainer.validate())]
                lines.append(f"call {call}: {in_order(trainer)}")
            lines.append(f"then: {in_order(trainer)}")
            models = trainer.get_model()
            outcome.keep(*(models if isinstance(models, list | tuple) else [models]))
            lines.append(f"optimizers {digest(trainer.state_dict()['optimizers'])}")
            lines = lines if program.has_order else []
            lines.append(f"events {[event.kind for event in trainer.status().events if event.is_failure]}")
    except Exception as error:
        lines.append(without_places(f"{type(error).__name__}: {error}"))
    return f"{outcome.exact} | {' | '.join(lines)}"


def in_order(trainer: TorchTrainer) -> str:
    """Return what has happened in each worker since the last time."""
    return " / ".join(map(", ".join, trainer.apply_all_operators(seams.events)))


def without_places(error: str) -> str:
    """Return an error in a line, without what depends on the machine or on lines of code."""
    return re.sub(r" raised at \S+|, node [\d.]+", "", " ".join(error.split()))[:600]


def digest(value: Any) -> str:
    """Return a digest of all numbers in a state."""
    found = hashlib.sha256()
    for name, each in _flat(value):
        is_tensor = isinstance(each, torch.Tensor) and each.numel()
        numbers = each.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if is_tensor else None
        found.update(name.encode())
        found.update(repr(each).encode() if numbers is None else numbers)
    return found.hexdigest()[:16]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from _flat(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _flat(each, f"{name}.{number}")
    else:
        yield name, value


def record_fixed(file: Path, names: list[str] | None, times: int) -> None:
    """Record the fixed programs."""
    with laboratory():
        for name, program in PROGRAMS.items():
            if names is not None and name not in names:
                continue
            found = [recorded(program) for _ in range(times)]
            with file.open("a", encoding="utf-8") as out:
                out.write(f"{name}: {found[0]}\n")
            note = "" if found.count(found[0]) == times else "  DIFFERS FROM ITSELF"
            print(f"{name}: {found[0][:100]}{note}", flush=True)


def record_idioms(file: Path, names: list[str] | None) -> None:
    """Record the idioms of training loops, calm and with a death at each place of a batch."""
    from tests.torch.idiom_table import PLACES, laboratory, ray_with_forks, run_idiom
    from tests.torch.idioms import IDIOMS

    with ray_with_forks(), laboratory(2) as lab:
        for name in names or IDIOMS:
            with file.open("a", encoding="utf-8") as out:
                for each in run_idiom(lab, name, PLACES, seed=1):
                    error = without_places(each.error)
                    out.write(f"{name} {each.death} {each.exact} {each.recovery} {each.num_left} {error}\n")
            print(name, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=["fixed", "idioms", *KINDS], help="what is recorded")
    parser.add_argument("--names", nargs="+", help="of fixed programs or idioms; all if it is left out")
    parser.add_argument("--programs", type=int, default=NUM_PROGRAMS, help="how many of each kind are drawn")
    parser.add_argument("--times", type=int, default=1, help="how often a fixed program runs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("raysgd").setLevel(logging.CRITICAL)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for what in arguments.only:
        file = arguments.folder / f"{what}.txt"
        file.unlink(missing_ok=True)
        if what == "fixed":
            record_fixed(file, arguments.names, arguments.times)
        elif what == "idioms":
            record_idioms(file, arguments.names)
        else:
            command = [sys.executable, "-m", "tests.programs", "--kind", what, "--programs", str(arguments.programs)]
            subprocess.run([*command, "--record", str(file)], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
