"""`find_jumps`: finds jumps in the loss of a run, steps at which the loss left its usual range.

The loss of a step is outside the range if it is not finite, or too far above the median of the last 20 losses. The
distance of a loss from the median is the difference of their logarithms. The median follows the loss, so a quickly
falling loss does not widen the range. A distance is too large if it exceeds a factor of 1,000, or all of these:

- three times the largest distance of the last 200 steps;
- ten times the spread of the distances of these steps;
- about 10% (0.1 in the logarithm).

The largest distance ignores outliers: it is the second largest of 20 steps and the fourth largest of 200 steps. The
spread is the median absolute deviation times 1.48, which estimates the standard deviation of a normal distribution.

The first 20 finite losses only define the range. Later losses outside the range do not change the range. Steps close
together whose losses are outside the range form one jump, which starts at the first of these steps. If the loss is
finite and outside the range for 100 steps in a row, these steps define a new range.

A negative loss has no logarithm. If any loss of the run is negative, all losses are divided by the median of their
absolute values instead. The distances that correspond to the factor of 1,000 and to 10% are then 1,000 and 0.1.
"""

from __future__ import annotations

import math
import os
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

import numpy as np

from raysgd.core.history.history import History
from raysgd.core.text import cards
from raysgd.journal.entries import LeftOutLine
from raysgd.journal.journal import journal_of

_Function: TypeAlias = Callable[[float], float]
WINDOW = 200
FEWEST = 20
_NEAR, _FEWEST_NEAR = 20, 5
_TIMES_FARTHEST = 3.0
_TIMES_USUAL = 10.0
_OUTLIERS_OF = 100  # the usual range ignores one outlier, and one more outlier per 100 steps
_LEAST = 0.1  # an increase of the loss by at most about 10% is no jump, even if the loss was steady before
_MOST = 1000.0  # an increase of the loss by a factor of over 1,000 is a jump, even if the loss was noisy before
_TOGETHER = 5
_NEW_RANGE = 100
_LEAST_LOSS = 1e-12
_MOST_LOG = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Jump:
    """One or more steps, close together, at which the loss left its usual range.

    Attributes:
        first: Number of the jump's first step, from 1.
        last: Number of the jump's last step.
        highest: The highest loss in these steps, or NaN or infinity if a loss was not finite.
        usual: Median of the last 20 losses in the usual range before the jump, or NaN if there were too few earlier
            losses.
        limit: The highest loss that would still have been in the usual range, or NaN if there were too few earlier
            losses.
    """

    first: int
    last: int
    highest: float
    usual: float
    limit: float


@dataclass(frozen=True)
class JumpsFound:
    """The steps at which the loss of a run left its usual range.

    Attributes:
        jumps: The jumps.
        num_steps: Number of steps of the run that have a loss.
        left_out: The steps that `Guard` left out. They may also be jumps.
    """

    jumps: tuple[Jump, ...]
    num_steps: int
    left_out: tuple[LeftOutLine, ...] = ()

    def __str__(self) -> str:
        """Return a table of the jumps as text, then the steps that were left out."""
        return "\n".join([self._table(), *(f"step {each.step} was {each}" for each in self.left_out)])

    def _table(self) -> str:
        if not self.jumps:
            return f"no jumps in {self.num_steps} steps"
        rows = [
            [
                str(each.first),
                str(each.last) if each.last > each.first else "",
                f"{each.highest:.6g}",
                f"{each.usual:.4g}",
                f"{each.limit:.4g}",
            ]
            for each in self.jumps
        ]
        table = cards.in_columns([["step", "until", "highest loss", "usual", "limit"], *rows], indent=2)
        return "\n".join([*table, "", f"{len(self.jumps)} of {self.num_steps} steps begin a jump"])


def find_jumps(run: str | os.PathLike[str] | History) -> JumpsFound:
    """Find the steps at which the loss of a run left its usual range. `docs/replay.md` defines this range.

    Args:
        run: The folder or the history of the run.

    Raises:
        FileNotFoundError: The run has no journal.
        ValueError: The journal is damaged, or no step reported a loss.
    """
    journal = journal_of(run)
    places = np.flatnonzero(journal.steps["weight"] > 0)
    if not len(places):
        raise ValueError("The journal has no losses: no step reported a metric with `loss` in its name.")
    found = jumps_in((places + 1).tolist(), journal.steps["loss"][places].tolist())
    return JumpsFound(tuple(found), len(places), tuple(journal.left_out))


class _Range:
    """The usual range of the loss, which is computed from recent losses.

    Args:
        most: Distance from the median at which a loss is outside the range, however noisy the losses were before.
        values: The first losses.
    """

    def __init__(self, most: float, values: Sequence[float] = ()) -> None:
        self._most = most
        self._near = deque[float](maxlen=_NEAR)
        self._recent, self._sorted = deque[float](), list[float]()
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        if len(self._near) >= _FEWEST_NEAR:
            self._recent.append(value - median(self._near))
            insort(self._sorted, self._recent[-1])
            if len(self._recent) > WINDOW:
                del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._near.append(value)

    @property
    def median(self) -> float:
        return median(self._near) if self._is_known else math.nan

    @property
    def _is_known(self) -> bool:
        return len(self._sorted) >= FEWEST - _FEWEST_NEAR

    @property
    def limit(self) -> float:
        """The highest value that the next loss can have without being a jump. NaN if too few losses are known."""
        if not self._is_known:
            return math.nan
        farthest = self._sorted[-2 - len(self._sorted) // _OUTLIERS_OF]
        middle = median(self._sorted)
        usual = median(abs(each - middle) for each in self._sorted) * 1.4826
        return self.median + min(max(_TIMES_FARTHEST * farthest, _TIMES_USUAL * usual, _LEAST), self._most)


def jumps_in(numbers: Sequence[int], losses: Sequence[float]) -> list[Jump]:
    """Return the jumps in the losses of steps.

    Args:
        numbers: The numbers of the steps, in ascending order.
        losses: The loss of each of these steps.

    Examples:
        >>> losses = [1 / step for step in range(1, 101)]
        >>> losses[59] *= 50
        >>> [jump.first for jump in jumps_in(range(1, 101), losses)]
        [60]
    """
    to_scale, from_scale, most = _scale_of(losses)
    usual, found, outside = _Range(most), list[Jump](), list[float]()
    num_since = math.inf  # number of steps since the last one outside the range
    for number, loss in zip(numbers, losses, strict=True):
        num_since += 1
        value, limit = (to_scale(loss) if math.isfinite(loss) else math.nan), usual.limit
        if math.isfinite(loss) and not value > limit:
            usual.add(value)
            continue
        if num_since > 1 or not math.isfinite(loss):
            outside = []
        if math.isfinite(loss):
            outside.append(value)
        if num_since <= _TOGETHER:
            last = found[-1]
            highest = loss if not math.isfinite(loss) else max(last.highest, loss)
            highest = highest if math.isfinite(last.highest) else last.highest
            found[-1] = Jump(last.first, number, highest, last.usual, last.limit)
        else:
            found.append(Jump(number, number, loss, from_scale(usual.median), from_scale(limit)))
        num_since = 0
        if len(outside) >= _NEW_RANGE:
            usual, outside = _Range(most, outside), []
    return found


def _scale_of(losses: Sequence[float]) -> tuple[_Function, _Function, float]:
    """Choose the scale in which losses are compared: a logarithmic scale, or a linear one if any loss is negative.

    Returns:
        A function that converts a loss to this scale, a function that converts it back, and a distance. A loss that is
        more than this distance above the median is always a jump.
    """
    known = [loss for loss in losses if math.isfinite(loss)]
    if min(known, default=0.0) >= 0:
        return (lambda loss: math.log(max(loss, _LEAST_LOSS))), _exp, math.log(_MOST)
    size = median(map(abs, known)) or 1.0
    return (lambda loss: loss / size), (lambda value: value * size), _MOST


def _exp(value: float) -> float:
    return math.inf if value > _MOST_LOG else math.exp(value)
