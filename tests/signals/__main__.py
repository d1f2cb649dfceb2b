"""Ends a program by random signals and kills, starts it again until it is done, and compares it with one in peace.

    python -m tests.signals --ends 100 --seed 1 --kind gan --workers 3,2,4 --sums build/signals.json

It can be interrupted: what came about until then is added to the file of `--sums`, to which each call adds. Without
`--ends` it only shows what the file has.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import psutil
import torch

from tests.helpers.forked import SWITCH, Forks, forks, to_lend
from tests.signals.program import BODY, HOOKS, OPERATORS

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1}
KINDS = (
    "TERM",
    "USR1",
    "TERM to the group",
    "USR1 to the group",
    "TERM and USR1",
    "TERM, and a worker dies",
    "TERM, and all workers die",
    "a worker dies, then TERM",
    "TERM, then KILL",
    "TERM in the start",
    "KILL",
    *(f"TERM in {hook}" for hook in (*HOOKS, BODY)),
)
"""The ends. A signal comes to the program, unless a kind says otherwise."""
IN_CODE = {f"TERM in {hook}": hook for hook in (*HOOKS, BODY)}
"""Signals that the program sends itself there."""
KEEP_STEP = {"TERM", "USR1", "TERM and USR1", "TERM, and a worker dies", *IN_CODE}
"""Ends that lose no step. A signal to the group may end Ray first, if the program has started it."""
STATUSES = {128 + number for number in SIGNALS.values()}
_STARTS_S, _ENDS_S = 240.0, 120.0
_TIMES = ("seconds", "per_s")


@dataclass
class Sums:
    """What came about.

    Attributes:
        ends: How often each kind of end came.
        num_runs: How many runs were done, and compared, by what they trained.
        lost: By kind, how many ends lost steps that the program had told of.
        most_lost: By kind, the most steps that one end lost.
        answered_s: By kind, the seconds from a signal to the end of the run.
        faults: What was wrong, in words.
    """

    ends: Counter[str] = field(default_factory=Counter)
    num_runs: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    most_lost: dict[str, int] = field(default_factory=dict)
    answered_s: dict[str, list[float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def note_end(self, kind: str, num_lost: int, seconds: float | None) -> None:
        """Take account of an end."""
        self.ends[kind] += 1
        self.lost[kind] += num_lost > 0
        self.most_lost[kind] = max(num_lost, self.most_lost.get(kind, 0))
        if seconds is not None:
            self.answered_s.setdefault(kind, []).append(seconds)

    def __str__(self) -> str:
        rows = [
            "| end | times | lost steps | most steps | seconds to the end (median, most) |",
            "|---|---|---|---|---|",
        ]
        for kind in (kind for kind in KINDS if self.ends[kind]):
            seconds = sorted(self.answered_s.get(kind, []))
            answered = f"{median(seconds):.2f}, {seconds[-1]:.2f}" if seconds else ""
            rows.append(f"| {kind} | {self.ends[kind]} | {self.lost[kind]} | {self.most_lost[kind]} | {answered} |")
        runs = ", ".join(f"{name}: {number}" for name, number in sorted(self.num_runs.items()))
        rows.append(f"{self.ends.total()} ends, runs that were done ({runs}), {len(self.faults)} faults")
        return "\n".join([*rows, *(f"FAULT {fault}" for fault in self.faults)])

    @classmethod
    def read(cls, path: Path) -> Sums:
        """Return what a file has; nothing if there is none."""
        known = json.loads(path.read_text()) if path.exists() else {}
        counters = {name: Counter(known.pop(name, {})) for name in ("ends", "num_runs", "lost")}
        return cls(**counters, **known)

    def add_to(self, path: Path) -> None:
        """Add all of it to a file."""
        known = Sums.read(path)
        kinds = {*known.ends, *self.ends}
        answered = {kind: [*known.answered_s.get(kind, []), *self.answered_s.get(kind, [])] for kind in kinds}
        both = Sums(
            known.ends + self.ends,
            known.num_runs + self.num_runs,
            known.lost + self.lost,
            {kind: max(known.most_lost.get(kind, 0), self.most_lost.get(kind, 0)) for kind in kinds},
            {kind: seconds for kind, seconds in answered.items() if seconds},
            known.faults + self.faults,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(both), indent=1))


class Program:
    """A program that trains in a folder.

    Args:
        folder: Where it writes.
        arguments: More of its arguments.
        cluster: The process whose children its workers are; None if the program starts their Ray.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], cluster: psutil.Process | None = None) -> None:
        self.folder, self._cluster = folder, cluster
        self._log = open(folder / "log", "ab")  # noqa: SIM115
        self._seen = len(self._told())
        command = [sys.executable, "-m", "tests.signals.program", str(folder), *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def _told(self) -> list[dict[str, Any]]:
        path = self.folder / "told.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]  # a kill may have cut one

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

    def end(self, kind: str, rng: random.Random) -> float | None:
        """End it; return how long the run took to end, if it told of its end."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        near = family if self._cluster is None else self._cluster.children(recursive=True)
        began = time.time()
        try:
            self._send(kind, workers_among(near), rng)
            self.process.wait(_ENDS_S)
        finally:
            self.close(family)
        ended = self.moment("end")
        return None if ended is None or kind == "KILL" else ended - began

    def _send(self, kind: str, workers: Sequence[psutil.Process], rng: random.Random) -> None:
        first = SIGNALS["USR1" if kind.startswith("USR1") else "TERM"]
        if kind == "KILL":
            self.process.kill()
            return
        if "worker" in kind and workers:
            for each in workers if "all" in kind else [rng.choice(workers)]:
                each.kill()
        if kind == "a worker dies, then TERM":
            time.sleep(rng.uniform(0.0, 1.5))
        self.process.send_signal(first)
        if kind.endswith("to the group"):
            os.killpg(self.process.pid, first)  # as `timeout` does: first to the process
        elif kind == "TERM and USR1":
            self.process.send_signal(signal.SIGUSR1)
        elif kind == "TERM, then KILL":
            time.sleep(rng.uniform(0.0, 0.5))
            self.process.kill()

    def close(self, family: Sequence[psutil.Process] = ()) -> None:
        """End what this program has started, and nothing else."""
        if self.process.poll() is None:
            family = [*family, *psutil.Process(self.process.pid).children(recursive=True)]
            self.process.kill()
            self.process.wait()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._log.close()


def workers_among(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return those that are workers, by their titles. One that is just changing its title may have none."""
    return [each for each in processes if "RaySGDWorker" in " ".join(_words(each))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def in_peace(folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the program once, from beginning to end; return what it found."""
    program = Program(folder, [*arguments, "--step-s", "0"])
    try:
        assert program.process.wait(_STARTS_S) == 0, (folder / "log").read_text()[-2000:]
    finally:
        program.close()
    return result_in(folder)


def result_in(folder: Path) -> dict[str, Any]:
    """Return what a run has found, and what its logger has written, without times."""
    found: dict[str, Any] = torch.load(folder / "done.pt", weights_only=False)
    tables = {}
    for path in sorted(folder.glob("metrics*.csv")):
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        tables[path.name] = [{name: row[name] for name in row if not _may_vary(name)} for row in rows]
    return {**found, "tables": tables}


def _may_vary(name: str) -> bool:
    """Return True for times, and for what depends on which worker rank 0 is and how many others there are."""
    return any(word in name for word in _TIMES) or name == "num_workers" or name.startswith("last_")


def disturbed(
    folder: Path,
    arguments: Sequence[str],
    workers: Sequence[int],
    rng: random.Random,
    sums: Sums,
    kinds: Sequence[str],
    most: int,
    step_s: float = 0.05,
    cluster: psutil.Process | None = None,
) -> dict[str, Any] | None:
    """Run it again and again, until it is done, and end it meanwhile; return what it found."""
    for number in range(most + 1):
        size, kind = str(workers[number % len(workers)]), rng.choice(kinds)
        own = [] if number == most or kind not in IN_CODE else signal_in(IN_CODE[kind], rng)
        program = Program(folder, [*arguments, "--workers", size, "--step-s", str(step_s), *own], cluster)
        try:
            if number == most:
                program.process.wait(_STARTS_S)
            if number == most or not _end(program, kind, rng, sums):
                break
        finally:
            program.close()
    if not (folder / "done.pt").exists():
        if number == most or not sums.faults:
            sums.faults.append(f"{folder}: it was not done: {(folder / 'log').read_text()[-1000:]}")
        return None
    return result_in(folder)


def signal_in(hook: str, rng: random.Random) -> list[str]:
    """Return the arguments with which a program sends itself a signal there, at a random one of the first calls."""
    most = {"on_run_begin": 1, "on_run_end": 1, "on_progress": 30}.get(hook, 3)
    return ["--signal-in", hook, "--signal-at", str(rng.randint(1, most))]


def _end(program: Program, kind: str, rng: random.Random, sums: Sums) -> bool:
    """End a program at a random moment. Return False if it was done, or something was wrong."""
    folder, is_in_start = program.folder, kind == "TERM in the start"
    if is_in_start:
        time.sleep(rng.uniform(0.0, 12.0))
    elif not program.await_begin():
        sums.faults.append(f"{folder}: it did not begin: {(folder / 'log').read_text()[-1000:]}")
        return False
    elif kind in IN_CODE:
        program.process.wait(_STARTS_S)
    else:
        time.sleep(rng.uniform(0.0, 2.5))
    if program.process.poll() is not None and not program.told("signal"):
        return False
    before = max([*program.told("step"), *program.told("begin")], default=0)
    seconds = None if kind in IN_CODE else program.end(kind, rng)
    if (folder / "done.pt").exists() and kind not in IN_CODE:
        return False
    newest = max([*program.told("saved"), *program.told("begin")], default=0)
    num_lost, status = max(0, before - newest), program.process.returncode
    sums.note_end(kind, num_lost, seconds)
    print(f"{kind}: in step {before}, saved {newest}, status {status}, {seconds or 0.0:.2f} s", flush=True)
    where = f"{folder}: {kind} in step {before} saved step {newest}, status {status}"
    is_told = bool(program.told("begin"))
    if kind in KEEP_STEP and num_lost:
        sums.faults.append(where)
    if is_told and "KILL" not in kind and status not in STATUSES:
        sums.faults.append(f"{where}: {(folder / 'log').read_text()[-1000:]}")
        return False
    return True


def difference(
    found: dict[str, Any],
    wanted: dict[str, Any],
    tolerance: float,
    counts_batches: bool = True,
    may_miss: Callable[[str, str | None], bool] = lambda where, name: False,
) -> str | None:
    """Return how two runs differ, in words.

    Args:
        found: The one.
        wanted: The other.
        tolerance: How much weights may differ. Metrics may always differ in the last digits.
        counts_batches: False where fewer workers took several batches for one, so that metrics come at other batches.
        may_miss: Returns True for a table and a name whose values may miss samples of lost workers, and for a table and
            None if it may lack rows.
    """
    for number, model in enumerate(wanted["state"]["models"]):
        for name, tensor in model.items():
            other = found["state"]["models"][number][name]
            if not torch.allclose(other, tensor, rtol=tolerance, atol=tolerance):
                return f"`{name}` differs by {(other - tensor).abs().max():.3g}"
    rows = {"history": (wanted["rows"], found["rows"])}
    if counts_batches:
        rows |= {name: (table, found["tables"].get(name, [])) for name, table in wanted["tables"].items()}
    for where, (expected, given) in rows.items():
        if may_miss(where, None):
            steps = {row["step"] for row in given}
            expected = [row for row in expected if row["step"] in steps]
        if len(expected) != len(given):
            return f"{where} has {len(given)} rows instead of {len(expected)}"
        for row, other in zip(expected, given, strict=True):
            for name in row if counts_batches else ("epoch", "num_samples", "train_loss", "val_loss"):
                if _may_vary(name) or may_miss(where, name):
                    continue
                if not _are_alike(row[name], other.get(name), max(tolerance, 1e-9)):
                    return f"`{name}` of {where} is {other.get(name)} instead of {row[name]}, in {row}"
    return None


def missed_with_workers(kind: str, ends: Collection[str], *, pauses: bool) -> Callable[[str, str | None], bool]:
    """Return what may miss samples of lost workers, as docs/recovery.md says.

    These are the metrics that workers had not sent when they died, which loggers get during an epoch. If all workers
    died, no worker is left that has the other samples of a row. They are also the last batch of each lost worker of a
    GAN.

    Args:
        kind: What is trained.
        ends: How the program was ended. Where no workers were killed, nothing may be missing.
        pauses: True if the run pauses inside epochs, to save. The driver gets all rows there.
    """
    misses_batch = kind == "gan"

    def may_miss(where: str, name: str | None) -> bool:
        if name is None:
            return where.endswith(".steps.csv") and not pauses and any("all workers" in each for each in ends)
        if not any("worker" in each for each in ends):
            return False
        if where.endswith(".steps.csv"):
            return name not in ("epoch", "step")
        return misses_batch and name != "epoch" and not name.startswith("val_")

    return may_miss


def _are_alike(wanted: Any, found: Any, tolerance: float) -> bool:
    if wanted == found:
        return True
    try:
        return abs(float(wanted) - float(found)) <= tolerance * max(1.0, abs(float(wanted)))
    except (TypeError, ValueError):
        return False


def tolerance_of(workers: Sequence[int], is_deterministic: bool) -> float:
    """Return how much two runs may differ: not at all, unless sums are made of other parts."""
    return 0.0 if is_deterministic and len(set(workers)) == 1 else 1e-7


def difference_after(
    ends: Collection[str],
    found: dict[str, Any],
    wanted: dict[str, Any],
    kind: str,
    workers: Sequence[int],
    is_deterministic: bool,
    *,
    pauses: bool = False,
) -> str | None:
    """Return how a run that was ended like this differs from one in peace, in words, where it must not.

    Args:
        ends: How the program was ended.
        found: What the run found.
        wanted: What the run in peace found.
        kind: What is trained.
        workers: How many workers the starts had.
        is_deterministic: Whether the sums are the same for any number of workers.
        pauses: True if the run pauses inside epochs, to save.
    """
    counts_batches = not (is_deterministic and any("worker" in each for each in ends))
    may_miss = missed_with_workers(kind, ends, pauses=pauses)
    return difference(found, wanted, tolerance_of(workers, is_deterministic), counts_batches, may_miss)


@contextmanager
def ended_well_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise inside the block, so that it adds up what came about."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    """Disturb runs until there were so many ends; return how many faults there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ends", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", default="plain", help=f"what is trained: some of {','.join(OPERATORS)}")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--workers", default="2", help="one after the other, such as 3,2,4")
    parser.add_argument("--how", action="append", help=f"an end, one of: {'; '.join(KINDS)}")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--standing", action="store_true", help="all programs use one Ray, which signals do not reach")
    parser.add_argument("--forked", action="store_true", help="workers are forked: an end takes half as long")
    parser.add_argument("--sums", type=Path)
    parser.add_argument("--keep", type=Path, help="where the folders of runs with faults go")
    asked = parser.parse_args()
    sums, rng = Sums(), random.Random(asked.seed)
    if not asked.ends:
        print(Sums.read(asked.sums))
        return 0
    try:
        with (
            ended_well_by_sigterm(),
            tempfile.TemporaryDirectory(prefix="signals-") as place,
            forked_workers() if asked.forked else nullcontext() as server,
            standing_cluster() if asked.standing else nullcontext() as standing,
        ):
            disturb_runs(asked, Path(place), rng, sums, server or standing)
    finally:
        print(sums, flush=True)
        if asked.sums is not None:
            sums.add_to(asked.sums)
    return len(sums.faults)


_RAY = """
import ray, sys
from tests.helpers.forked import lent_forks
from tests.helpers.ray_start import patient_ray
with lent_forks().starting(), patient_ray():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def standing_cluster() -> Iterator[psutil.Process]:
    """Start a Ray that programs find by `RAY_ADDRESS`, and end it behind the block."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # programs are not told its token
    options: Any = {
        "env": environment,
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
    }
    with subprocess.Popen([sys.executable, "-c", _RAY], cwd=ROOT, start_new_session=True, **options) as cluster:
        os.environ["RAY_ADDRESS"] = cluster.stdout.readline().strip()
        try:
            yield psutil.Process(cluster.pid)
        finally:
            del os.environ["RAY_ADDRESS"]
            cluster.stdin.close()  # it ends its Ray


@contextmanager
def forked_workers() -> Iterator[psutil.Process]:
    """Let programs have forked workers, and yield the process whose children these are."""
    with forks() as found, mock.patch.dict(os.environ, to_lend()):
        assert isinstance(found, Forks), f"{SWITCH} rules it out"
        yield psutil.Process(found.server.pid)


def disturb_runs(
    asked: argparse.Namespace, place: Path, rng: random.Random, sums: Sums, cluster: psutil.Process | None
) -> None:
    """Disturb one run after the other, and compare each with one in peace."""
    workers = [int(each) for each in asked.workers.split(",")]
    whole = dict[str, dict[str, Any]]()
    while sums.ends.total() < asked.ends:
        kind = rng.choice(asked.kind.split(","))
        arguments = ["--kind", kind, "--epochs", str(asked.epochs)]
        arguments += ["--deterministic"] if asked.deterministic else []
        if kind not in whole:
            (place / f"whole_{kind}").mkdir()
            whole[kind] = in_peace(place / f"whole_{kind}", [*arguments, "--workers", str(workers[0])])
        folder = place / f"run_{sums.num_runs.total() + len(sums.faults)}"
        folder.mkdir()
        more = ["--every-n-steps", "5"] if rng.random() < 0.5 else []
        num_faults, most = len(sums.faults), asked.ends - sums.ends.total()
        kinds = asked.how or KINDS
        before = sums.ends.copy()
        found = disturbed(folder, [*arguments, *more], workers, rng, sums, kinds, most, cluster=cluster)
        if found is not None:
            came = sums.ends - before
            wrong = difference_after(came, found, whole[kind], kind, workers, asked.deterministic, pauses=bool(more))
            sums.num_runs[f"{kind} on {asked.workers}{', deterministic' if asked.deterministic else ''}"] += 1
            sums.faults.extend([] if wrong is None else [f"{folder} {more}: {wrong}"])
        if len(sums.faults) > num_faults and asked.keep is not None:
            shutil.copytree(folder, asked.keep / f"{kind}_{asked.seed}_{len(sums.faults)}", dirs_exist_ok=True)
        print(f"{sums.ends.total()} ends, {len(sums.faults)} faults", flush=True)


if __name__ == "__main__":
    sys.exit(bool(main()))
