"""Ends a program by random signals and kills, starts it again until it is done, and compares it with one in peace.

    python -m tests.signals --ends 100 --seed 1 --kind plain --workers 2

It can be interrupted: what came about until then is summed up in `--sums FILE`, to which each call adds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("TERM", "USR1", "TERM to the group", "TERM, and a worker dies", "KILL")
_STARTS_S, _ENDS_S = 240.0, 120.0


@dataclass
class Sums:
    """What came about.

    Attributes:
        ends: How often each kind of end came.
        num_runs: How many runs were done, and compared.
        lost: By kind, how many steps were done again that the program had told of.
        answered_s: Seconds from a signal to the end of the run.
        faults: What was wrong, in words.
    """

    ends: Counter[str] = field(default_factory=Counter)
    num_runs: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        seconds = sorted(self.answered_s)
        answered = f"; answered in {median(seconds):.2f} s (median), {seconds[-1]:.2f} s (most)" if seconds else ""
        return f"{self.num_runs} runs, ended {dict(self.ends)}; steps done again {dict(self.lost)}{answered}" + "".join(
            f"\nFAULT {fault}" for fault in self.faults
        )

    def add_to(self, path: Path) -> None:
        """Add all of it to a file."""
        known = json.loads(path.read_text()) if path.exists() else {}
        for name in ("ends", "lost"):
            known[name] = dict(Counter(known.get(name, {})) + getattr(self, name))
        known["num_runs"] = known.get("num_runs", 0) + self.num_runs
        for name in ("answered_s", "faults"):
            known[name] = known.get(name, []) + getattr(self, name)
        path.write_text(json.dumps(known))


class Program:
    """A program that trains in a folder.

    Args:
        folder: Where it writes.
        arguments: More of its arguments.
    """

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        self._log = open(folder / "log", "ab")  # noqa: SIM115
        self._seen = len(self._told())
        command = [sys.executable, "-m", "tests.signals.program", str(folder), *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def _told(self) -> list[dict[str, Any]]:
        path = self.folder / "told.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def told(self, name: str) -> list[Any]:
        """Return what it has told of one kind so far."""
        return [each[name] for each in self._told()[self._seen :] if name in each]

    def moment(self, name: str) -> float | None:
        """Return when it told so last."""
        return next((each["at"] for each in reversed(self._told()[self._seen :]) if name in each), None)

    def await_begin(self) -> bool:
        """Wait until it trains; False if it has ended before."""
        end = time.monotonic() + _STARTS_S
        while self.process.poll() is None and time.monotonic() < end:
            if self.told("begin"):
                return True
            time.sleep(0.05)
        return bool(self.told("begin"))

    def end(self, kind: str) -> float:
        """End it; return how long the run took to end."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        began = time.time()
        if kind == "KILL":
            self.process.kill()
        elif kind == "TERM to the group":
            self.process.send_signal(signal.SIGTERM)  # as `timeout` does
            os.killpg(self.process.pid, signal.SIGTERM)
        else:
            workers = [each for each in family if "RaySGDWorker" in " ".join(_words(each))]
            if kind == "TERM, and a worker dies" and workers:
                workers[-1].kill()
            self.process.send_signal(signal.SIGUSR1 if kind == "USR1" else signal.SIGTERM)
        try:
            self.process.wait(_ENDS_S)
        finally:
            for each in family:  # what this program has started, and nothing else
                try:
                    each.kill()
                except psutil.NoSuchProcess:
                    continue
            if self.process.poll() is None:
                self.process.kill()
            self._log.close()
        ended = self.moment("end")
        return 0.0 if ended is None else ended - began


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def in_peace(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run the program once, from beginning to end; return what it found."""
    program = Program(folder, [*arguments, "--step-s", "0"])
    assert program.process.wait(_STARTS_S) == 0, (folder / "log").read_text()[-2000:]
    found: dict[str, Any] = torch.load(folder / "done.pt", weights_only=False)
    return found


def disturbed(
    folder: Path, arguments: list[str], workers: list[int], rng: random.Random, sums: Sums, kinds: list[str], most: int
) -> dict[str, Any] | None:
    """Run it again and again, until it is done, and end it meanwhile; return what it found."""
    for number in range(most + 1):
        size = str(workers[number % len(workers)])
        program = Program(folder, [*arguments, "--workers", size])
        if not program.await_begin():
            sums.faults.append(f"{folder}: it did not begin: {(folder / 'log').read_text()[-500:]}")
            return None
        if number == most:
            program.process.wait(_STARTS_S)
        else:
            time.sleep(rng.uniform(0.0, 2.5))
        if program.process.poll() is not None:
            break
        kind = rng.choice(kinds)
        before = max([*program.told("step"), *program.told("begin")])
        seconds = program.end(kind)
        sums.ends[kind] += 1
        if (folder / "done.pt").exists():
            break
        newest = max([*program.told("saved"), *program.told("begin")])
        sums.lost[kind] += max(0, before - newest)
        if kind != "KILL":
            sums.answered_s.append(seconds)
        print(f"{kind}: at step {before}, saved {newest}, {seconds:.2f} s", flush=True)
        if kind in ("TERM", "USR1") and before > newest:
            sums.faults.append(f"{folder}: {kind} in step {before} saved step {newest}")
    path = folder / "done.pt"
    if not path.exists():
        sums.faults.append(f"{folder}: it was not done: {(folder / 'log').read_text()[-1000:]}")
        return None
    found: dict[str, Any] = torch.load(path, weights_only=False)
    return found


def difference(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> str | None:
    """Return how two runs differ, in words."""
    for name, tensor in wanted["state"]["models"][0].items():
        other = found["state"]["models"][0][name]
        if not torch.allclose(other, tensor, rtol=tolerance, atol=tolerance):
            return f"`{name}` differs by {(other - tensor).abs().max():.3g}"
    for row, other in zip(wanted["rows"], found["rows"], strict=True):
        for name in ("epoch", "num_samples", "batch_count"):
            if row[name] != other[name]:
                return f"`{name}` of epoch {row['epoch']} is {other[name]} instead of {row[name]}"
        if abs(row["train_loss"] - other["train_loss"]) > tolerance * max(1.0, abs(row["train_loss"])):
            return f"`train_loss` of epoch {row['epoch']} is {other['train_loss']} instead of {row['train_loss']}"
    return None


def main() -> int:
    """Disturb runs until there were so many ends; return how many faults there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ends", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", default="plain")
    parser.add_argument("--workers", default="2", help="one after the other, such as 3,2,4")
    parser.add_argument("--how", default=",".join(KINDS), help="which ends")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sums", type=Path)
    asked = parser.parse_args()
    workers, sums, rng = [int(each) for each in asked.workers.split(",")], Sums(), random.Random(asked.seed)
    arguments = ["--kind", asked.kind, "--epochs", str(asked.epochs)]
    tolerance = 0.0 if len(set(workers)) == 1 else 1e-5
    kinds = asked.how.split(",") if asked.how != ",".join(KINDS) else list(KINDS)
    try:
        with tempfile.TemporaryDirectory(prefix="signals-") as place:
            whole = Path(place, "whole")
            whole.mkdir()
            wanted = in_peace(whole, [*arguments, "--workers", str(workers[0])])
            while sum(sums.ends.values()) < asked.ends and not sums.faults:
                folder = Path(place, f"run{sums.num_runs}")
                folder.mkdir()
                more = [*arguments, *(["--every-n-steps", "5"] if rng.random() < 0.5 else [])]
                most = asked.ends - sum(sums.ends.values())
                found = disturbed(folder, more, workers, rng, sums, kinds, most)
                if found is not None:
                    sums.num_runs += 1
                    wrong = difference(found, wanted, tolerance)
                    sums.faults.extend([] if wrong is None else [f"{more}: {wrong}"])
                print(sums, flush=True)
    finally:
        if asked.sums is not None:
            sums.add_to(asked.sums)
    return len(sums.faults)


if __name__ == "__main__":
    sys.exit(bool(main()))
