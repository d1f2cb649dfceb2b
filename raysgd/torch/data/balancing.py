"""`balance="speed"`: a worker measures its steps and tells the others, and the shares of global batches follow.

A worker's time for a step is measured without what it waits for others. Shares change where times differ, so that each
worker takes as long as the others. The rule is arithmetic on the same numbers, so all workers decide alike.

Why measured times decide, and when shares change: ADR 98.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from raysgd.torch.parallel.strategy import Summation

EVERY = 4
"""After how many steps speeds are corrected, at the earliest."""
TOLERANCE = 0.1
"""By which part times may differ before anything is changed: they are never quite the same."""
NEWEST = 0.5
"""What the newest measurement counts for, against all before."""
MOST_RATIO = 8.0
"""The fastest worker counts as at most so many times as fast as the slowest one."""
CHANCE = 0.3
"""Up to this part, times may differ by chance: it takes two measurements with the same slowest worker."""


def corrected(speeds: Sequence[float], samples: Sequence[float], seconds: Sequence[float]) -> tuple[float, ...] | None:
    """New speeds, with 1 for the fastest worker; None where the present ones stay.

    Args:
        speeds: Those before; empty for even shares.
        samples: How many each worker took.
        seconds: How long it took for them.

    Examples:
        >>> corrected((), samples=[32, 32], seconds=[1.0, 2.0])
        (1.0, 0.5)
        >>> corrected((), samples=[32, 32], seconds=[1.0, 1.05]) is None
        True
    """
    if min(seconds) <= 0 or min(samples) <= 0 or max(seconds) <= min(seconds) * (1 + TOLERANCE):
        return None
    found = _with_fastest_1([number / time for number, time in zip(samples, seconds, strict=True)])
    if speeds:
        before = _with_fastest_1(speeds)
        found = [NEWEST * new + (1 - NEWEST) * old for new, old in zip(found, before, strict=True)]
    return tuple(max(speed, 1 / MOST_RATIO) for speed in _with_fastest_1(found))


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


class Balancing:
    """Shares by speed in one group.

    After some steps the ranks add up what each has measured, beside the next step. All of them then have the same
    numbers, and change their shares at the same position in the data.

    Args:
        rank: The place in the group.
        world_size: Its size.
        own_s: Says for how long this rank has trained so far, without waiting for others.
        start_sum: How the ranks add up.

    Attributes:
        num_ahead: How many steps the loader may be ahead of the training.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        own_s: Callable[[], float],
        start_sum: Summation,
    ) -> None:
        self._rank, self._world_size, self._own_s = rank, world_size, own_s
        self._plan = SpeedPlan()
        self._start_sum = start_sum
        self.num_ahead = 0
        self._slowest: int | None = None  # in the last measurement, if times differed
        self._is_settled = False  # the first step of a group is not measured: it is slow for other reasons
        self._waiting: tuple[Callable[[], Any], torch.Tensor] | None = None
        self._forget()

    def _forget(self) -> None:
        self._num_steps, self._num_samples, self._since_s = 0, 0, self._own_s()

    def speeds_at(self, position: int) -> Sequence[float]:
        """See `PassPlan`."""
        return self._plan.at(position)

    def begin_pass(self) -> None:
        """Called when a pass is opened or resumed."""
        self._plan.begin_pass()

    def after_batch(self, num_samples: int, is_last: bool, position: int, global_size: int) -> None:
        """Called by all ranks after each batch.

        Args:
            num_samples: This rank's samples in it.
            is_last: Whether the global step ended with it.
            position: Where the next one begins.
            global_size: Samples of a global step.
        """
        self._num_samples += num_samples
        if is_last:
            self._after_step(position, global_size)

    def _after_step(self, position: int, global_size: int) -> None:
        self._num_steps += 1
        if self._plan.reach(position) or not self._is_settled:
            self._is_settled = True
            self._forget()  # measured with other shares, or in the first step
        if self._waiting is not None:
            self._hear(position, global_size)
        if self._num_steps >= EVERY and not self._plan.is_changing:
            self._tell()

    def _tell(self) -> None:
        own_s = self._own_s() - self._since_s
        numbers = torch.zeros(3, self._world_size, dtype=torch.float64)
        numbers[:, self._rank] = torch.tensor([self._num_samples, own_s, self.num_ahead], dtype=torch.float64)
        self._waiting = self._start_sum(numbers), numbers
        self._forget()

    def _hear(self, position: int, global_size: int) -> None:
        """Takes what all ranks have told, which came while the last step was computed."""
        assert self._waiting is not None
        (wait, numbers), self._waiting = self._waiting, None
        wait()
        samples, seconds, ahead = numbers.tolist()
        speeds = corrected(self._plan.now, samples, seconds)
        before, self._slowest = self._slowest, None if speeds is None else seconds.index(max(seconds))
        if speeds is not None and (before == self._slowest or max(seconds) > min(seconds) * (1 + CHANCE)):
            self._plan.change(position + int(max(ahead)) * global_size, speeds)
            self._plan.reach(position)
            self._forget()
