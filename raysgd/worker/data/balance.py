"""Shares of a joint batch that follow the speed of the workers: decisions on numbers that all workers know.

A worker's time for a step is measured without what it waits for others. Shares change where times differ, so that each
worker takes as long as the others. All of this is arithmetic on the same numbers, so all workers decide alike.

Why measured times decide, and when shares change: ADR 98.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SpeedRule:
    """The rule that says when and how far speeds are corrected.

    Attributes:
        every: After how many steps at the earliest.
        tolerance: By which part times may differ before anything is changed: they are never quite the same.
        newest: What the newest measurement counts for, against all before.
        most_ratio: The fastest worker counts as at most so many times as fast as the slowest one.
        chance: Up to this part, times may differ by chance: it takes two measurements with the same slowest worker.
    """

    every: int = 4
    tolerance: float = 0.1
    newest: float = 0.5
    most_ratio: float = 8.0
    chance: float = 0.3

    def may_be_chance(self, seconds: Sequence[float]) -> bool:
        """Tells whether times differ by so little that the next ones may be alike."""
        return max(seconds) <= min(seconds) * (1 + self.chance)

    def corrected(
        self, speeds: Sequence[float], samples: Sequence[float], seconds: Sequence[float]
    ) -> tuple[float, ...] | None:
        """New speeds, with 1 for the fastest worker; None where the present ones stay.

        Args:
            speeds: Those before; empty for even shares.
            samples: How many each worker took.
            seconds: How long it took for them.

        Examples:
            >>> SpeedRule().corrected((), samples=[32, 32], seconds=[1.0, 2.0])
            (1.0, 0.5)
            >>> SpeedRule().corrected((), samples=[32, 32], seconds=[1.0, 1.05]) is None
            True
        """
        if min(seconds) <= 0 or min(samples) <= 0 or max(seconds) <= min(seconds) * (1 + self.tolerance):
            return None
        found = _with_fastest_1([number / time for number, time in zip(samples, seconds, strict=True)])
        if speeds:
            before = _with_fastest_1(speeds)
            found = [self.newest * new + (1 - self.newest) * old for new, old in zip(found, before, strict=True)]
        return tuple(max(speed, 1 / self.most_ratio) for speed in _with_fastest_1(found))


def _with_fastest_1(speeds: Sequence[float]) -> list[float]:
    return [speed / max(speeds) for speed in speeds]


class SpeedPlan:
    """The speeds that hold in each part of a pass. A change holds from a position that no worker has divided yet."""

    def __init__(self) -> None:
        self.now: tuple[float, ...] = ()
        self._coming: tuple[int, tuple[float, ...]] | None = None

    def at(self, position: int) -> Sequence[float]:
        """The speeds in the step that begins at a position; empty for even shares."""
        if self._coming is not None and position >= self._coming[0]:
            return self._coming[1]
        return self.now

    @property
    def is_changing(self) -> bool:
        """True if a change was decided and does not hold everywhere yet."""
        return self._coming is not None

    def change(self, position: int, speeds: tuple[float, ...]) -> None:
        """Lets other speeds hold from a position on."""
        self._coming = position, speeds

    def reach(self, position: int) -> bool:
        """Says that the step at this position comes next; returns whether other speeds hold from there on."""
        is_reached = self._coming is not None and position >= self._coming[0]
        if is_reached:
            self.begin_pass()
        return is_reached

    def begin_pass(self) -> None:
        """Says that a pass is opened: nothing of it is divided yet, so what was decided holds from its beginning."""
        if self._coming is not None:
            self.now, self._coming = self._coming[1], None
