"""What workers that are killed leave in a folder: where they die, and when their steps counted.

Needs nothing but Python, so that programs of other libraries can leave the same.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

BETWEEN, IN_EXCHANGE, ANYWHERE = "between", "exchange", "anywhere"
PLACES = {BETWEEN: "between two steps", IN_EXCHANGE: "in an exchange", ANYWHERE: "anywhere"}
_LOOK_S, _PATIENCE_S, _RETURN_S = 0.005, 5.0, 60.0
_FRESH_S = 0.4
_INTO_EXCHANGE_S = 0.0005
_LAST, _MARGIN = "last pass", 5
_FAILED = "failed"
Line = tuple[int, float, str]
"""Of a trail: the number of the group, the time, and the pass of a step that counted."""


class Trail:
    """What one worker leaves.

    Args:
        folder: Shared by all workers.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def at(self, place: str, *names: str) -> None:
        """Dies here, if that is wanted of this process, or of a file with one of these names."""
        for death in (self._folder / name for name in (f"{place} {os.getpid()}", *names)):
            if death.exists():
                end = partial(kill_noting, self._folder, os.getpid(), place, death)
                end() if place == BETWEEN else threading.Timer(_INTO_EXCHANGE_S, end).start()

    def step(self, group: int, num_passes: int = 0) -> None:
        """A step counted, in the group of this number, in the pass of this number."""
        self._note(f"{group} {time.time()} {num_passes}")

    def fail(self, group: int) -> None:
        """A batch failed."""
        self._note(f"{group} {time.time()} {_FAILED}")

    def _note(self, line: str) -> None:
        with (self._folder / f"steps {os.getpid()}").open("a") as notes:
            print(line, file=notes)

    @property
    def last_pass(self) -> float:
        """The number of the pass before which to stop."""
        with suppress(FileNotFoundError, ValueError):
            return int((self._folder / _LAST).read_text())
        return float("inf")


@dataclass(frozen=True)
class Loss:
    """What a kill came to.

    Attributes:
        at: When it was.
        place: Where.
        seconds: Until the first step that counted of a process that had been in the group, in a later group.
        num_failed: The batches that such a process noted as failed until then.
    """

    at: float
    place: str
    seconds: float
    num_failed: int


def losses_in(folder: Path) -> list[Loss]:
    """All kills, in order."""
    seen = [_lines(path) for path in folder.glob("steps *")]
    kills = sorted((float(at), place) for at, place in (path.read_text().split() for path in folder.glob("killed *")))
    return [_loss(at, place, seen) for at, place in kills]


def _loss(at: float, place: str, seen: Sequence[Sequence[Line]]) -> Loss:
    later, failed = [], []
    for lines in seen:
        group = max((group for group, noted, _ in lines if noted <= at), default=None)
        if group is not None:
            after = [line for line in lines if line[1] > at]
            later += [noted for each, noted, what in after if each > group and what != _FAILED]
            failed.append([noted for _, noted, what in after if what == _FAILED])
    until = min(later, default=float("inf"))
    return Loss(at, place, until - at, max(sum(noted < until for noted in each) for each in failed))


class Killer(threading.Thread):
    """Kills a worker whenever all are there, a third of them in each place; then says which pass is the last.

    Args:
        folder: Where workers leave their trails.
        num_kills: How many.
        num_workers: How many have to be there.
        most_s: For how long it leaves them alone at most.
        seed: Of all chance.
    """

    def __init__(self, folder: Path, num_kills: int, num_workers: int, most_s: float, seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._folder, self._num_kills, self._num_workers, self._most_s = folder, num_kills, num_workers, most_s
        self._chance = random.Random(seed)

    def run(self) -> None:
        while True:
            self._await(lambda: len(self._there()) >= self._num_workers, _RETURN_S)
            if len(list(self._folder.glob("killed *"))) >= self._num_kills:
                break
            time.sleep(self._chance.uniform(0.05, self._most_s))
            there = self._there()
            if there:
                self._kill(self._chance.choice(there))
        passes = [int(what) for path in self._folder.glob("steps *") for *_, what in _lines(path) if what != _FAILED]
        partial = self._folder / "last"
        partial.write_text(str(max(passes) + _MARGIN))
        partial.rename(self._folder / _LAST)

    def _kill(self, process: int) -> None:
        num_before = len(list(self._folder.glob("killed *")))
        place = list(PLACES)[num_before % len(PLACES)]
        if place == ANYWHERE:
            kill_noting(self._folder, process, place)
            return
        death = self._folder / f"{place} {process}"
        death.touch()
        if not self._await(lambda: not death.exists(), _PATIENCE_S):
            death.unlink(missing_ok=True)

    def _there(self) -> list[int]:
        """The processes that have taken a step just now, but for those that were killed."""
        killed = {path.name.split()[1] for path in self._folder.glob("killed *")}
        fresh = [path for path in self._folder.glob("steps *") if time.time() - path.stat().st_mtime < _FRESH_S]
        return sorted(int(name) for name in {path.name.split()[1] for path in fresh} - killed)

    @staticmethod
    def _await(is_so: Callable[[], bool], most_s: float) -> bool:
        deadline = time.monotonic() + most_s
        while not is_so():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True


def kill_noting(folder: Path, process: int, place: str, death: Path | None = None) -> None:
    """Ends a process in the hard way, and leaves a note of that instead of the file that asked for it."""
    (folder / f"killed {process}").write_text(f"{time.time()} {place}")
    if death is not None:
        death.unlink(missing_ok=True)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _lines(path: Path) -> list[Line]:
    """What a process noted, but for a line that it died in."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(line[0]), float(line[1]), line[2]) for line in lines if len(line) == 3]
