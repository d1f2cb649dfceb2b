"""Kills workers on a schedule: what workers leave behind so that they are found, and who dies when."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOOK_S = 0.01


class Trail:
    """What a worker leaves in a folder: that it trains, since when, and how many samples went through it.

    Args:
        folder: Shared by all workers.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._samples: int | None = None

    def begin(self, num_samples: int) -> None:
        """A step with so many samples begins."""
        if self._samples is None:
            self._samples = self._introduce()
        os.write(self._samples, b"." * num_samples)

    def _introduce(self) -> int:
        pid = os.getpid()
        with (self._folder / "first").open("a") as file:
            file.write(f"{time.monotonic()!r}\n")
        (self._folder / f"alive-{pid}-{started_at(pid)}").touch()
        return os.open(self._folder / f"samples-{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def has_begun(folder: str) -> bool:
    """Whether a worker has begun its first step."""
    return (Path(folder) / "first").exists()


def wall_of(folder: str, ended: float) -> float:
    """Seconds from the beginning of the first step of all until `ended`."""
    return ended - min(map(float, (Path(folder) / "first").read_text().split()))


def samples_begun(folder: str) -> int:
    """How many samples went into steps, those that were lost with their step included."""
    return sum(path.stat().st_size for path in Path(folder).glob("samples-*"))


def alive_in(folder: str) -> list[int]:
    """The processes that train, or have trained, and have not ended."""
    told = [path.name.split("-")[1:] for path in Path(folder).glob("alive-*")]
    return sorted(int(pid) for pid, started in told if started_at(int(pid)) == int(started))


def started_at(pid: int) -> int | None:
    """When a process started, which tells it from a later one of the same number; None if it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


class Schedule:
    """When to kill, and whom. It does not wait for a contender that has not recovered: the next kill comes in time.

    Args:
        every_s: Seconds from one kill to the next, and to the first.
        seed: Of the choice of victims.
        max_kills: After so many there are no more; None for no limit.
    """

    def __init__(self, every_s: float, seed: int, max_kills: int | None = None) -> None:
        self._every_s, self._chance, self._max_kills = every_s, random.Random(seed), max_kills
        self.num_kills = 0

    @property
    def is_over(self) -> bool:
        return self.num_kills == self._max_kills

    def times(self, began: float) -> Iterator[float]:
        """When kills are due, as long as there are to be more."""
        number = 1
        while not self.is_over:
            yield began + number * self._every_s
            number += 1

    def victim(self, alive: Sequence[int]) -> int | None:
        """One of the living; None if there is none: a kill that hits no worker does not count."""
        if not alive:
            return None
        self.num_kills += 1
        return self._chance.choice(alive)


class Killer(threading.Thread):
    """Follows a schedule, from the first step on.

    Args:
        folder: Where the workers leave their trails.
        schedule: What to follow.
    """

    def __init__(self, folder: str, schedule: Schedule) -> None:
        super().__init__(name="killer", daemon=True)
        self._folder, self._schedule = folder, schedule
        self._is_stopped = threading.Event()

    def run(self) -> None:
        while not has_begun(self._folder):
            if self._is_stopped.wait(_LOOK_S):
                return
        for due in self._schedule.times(time.monotonic()):
            if self._is_stopped.wait(max(0.0, due - time.monotonic())):
                return
            victim = self._schedule.victim(alive_in(self._folder))
            if victim is not None:
                os.kill(victim, signal.SIGKILL)

    def stop(self) -> None:
        self._is_stopped.set()


@contextmanager
def killing(folder: str, schedule: Schedule | None) -> Iterator[None]:
    """Inside, workers are killed; without a schedule none is."""
    if schedule is None:
        yield
        return
    killer = Killer(folder, schedule)
    killer.start()
    try:
        yield
    finally:
        killer.stop()
        killer.join()
