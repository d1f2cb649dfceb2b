"""A plan of what is to go wrong where, for functions that run in real workers.

    plan = FailurePlan(tmp_path).die(rank=1, step=3).fail(rank=0)
    ...
    plan.check(rank, step)  # in the worker

Each entry happens once, or as often as it says, over all processes and all their successors: that it happened is
noted in a folder before it does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path


class InjectedError(RuntimeError):
    """What `fail` raises."""


@dataclass(frozen=True)
class Entry:
    """One thing that goes wrong.

    Attributes:
        act: Lets it happen.
        rank: Where; None for any rank.
        step: When; None for the next time that the plan is looked at.
        times: How often.
    """

    act: Callable[[], None]
    rank: int | None
    step: int | None
    times: int

    def is_due(self, rank: int, step: int | None) -> bool:
        return self.rank in (None, rank) and self.step in (None, step)


@dataclass(frozen=True)
class FailurePlan:
    """An immutable plan; each verb returns a longer one. `folder` must be seen by all workers."""

    folder: Path
    entries: tuple[Entry, ...] = ()

    def fail(self, *, rank: int | None, step: int | None = None, times: int = 1) -> FailurePlan:
        """An ordinary exception in user code."""
        return self.raise_(rank=rank, error=InjectedError(f"injected at step {step}"), step=step, times=times)

    def raise_(self, *, rank: int | None, error: BaseException, step: int | None = None, times: int = 1) -> FailurePlan:
        """This very exception."""
        return self._with(_Raise(error), rank, step, times)

    def die(self, *, rank: int | None, step: int | None = None, times: int = 1) -> FailurePlan:
        """The process is gone at once, as with SIGKILL or a lost machine."""
        return self._with(_die, rank, step, times)

    def hang(self, *, rank: int | None, seconds: float, step: int | None = None, times: int = 1) -> FailurePlan:
        """The process does nothing for a while."""
        return self._with(_Hang(seconds), rank, step, times)

    def check(self, rank: int, step: int | None = None) -> None:
        """Lets happen what is due on this rank at this step."""
        for index, entry in enumerate(self.entries):
            if entry.is_due(rank, step) and self._claim(index, entry.times):
                entry.act()

    @property
    def num_fired(self) -> int:
        """How many times something happened."""
        return len(list(self.folder.glob("fired-*")))

    def _with(self, act: Callable[[], None], rank: int | None, step: int | None, times: int) -> FailurePlan:
        return replace(self, entries=(*self.entries, Entry(act, rank, step, times)))

    def _claim(self, index: int, times: int) -> bool:
        for turn in range(times):
            try:
                (self.folder / f"fired-{index}-{turn}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False


@dataclass(frozen=True)
class _Raise:
    error: BaseException

    def __call__(self) -> None:
        raise self.error


@dataclass(frozen=True)
class _Hang:
    seconds: float

    def __call__(self) -> None:
        time.sleep(self.seconds)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
