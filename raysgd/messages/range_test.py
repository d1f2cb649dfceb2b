"""The learning-rate range test: steps with growing rates on live workers, and what the losses say.

After Leslie Smith, "Cyclical Learning Rates for Training Neural Networks" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysgd import _arguments as checks
from raysgd._imports import require

_SMOOTHING = 0.9
_STEPS_PER_CALL = 10
_FEWEST_FOR_A_SUGGESTION = 5

Loss = tuple[float, float]
"""Of one step on one worker: the loss, and its weight."""


@dataclass(frozen=True)
class RangeTest:
    """The arguments of `find_lr`. Its docstring says what each field means.

    Raises:
        ValueError: A value cannot work.
        InvalidCountError: `num_steps` is no count.
    """

    start: float
    end: float
    num_steps: int
    stop_at: float

    def __post_init__(self) -> None:
        checks.check_count("num_steps", self.num_steps, hint="100 steps show a curve well.")
        for name in ("start", "end", "stop_at"):
            if not checks.is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise ValueError(f"`{name}={getattr(self, name)!r}`: need a number larger than 0.")
        if self.start >= self.end:
            raise ValueError(f"`start={self.start!r}` with `end={self.end!r}`: rates grow from `start` to `end`.")

    @property
    def rates(self) -> list[float]:
        """The rate of each step: each is the one before times the same number."""
        return [float(rate) for rate in np.geomspace(self.start, self.end, self.num_steps)]

    def run(self, take_steps: Callable[[Sequence[float]], list[list[Loss]]]) -> LrCurve:
        """Takes steps until the rates are used up, or the loss has become too large.

        Args:
            take_steps: Takes a step with each of these rates, or as many as the pass has left; returns the losses of
                each worker.

        Raises:
            ValueError: There are no batches.
        """
        rates, losses = self.rates, list[float]()
        num_empty = 0
        while len(losses) < len(rates) and not self._is_diverged(losses):
            means = _means(take_steps(rates[len(losses) : len(losses) + _STEPS_PER_CALL]))
            losses += means
            num_empty = 0 if means else num_empty + 1
            if num_empty == 2:  # the first one may only have found the end of a pass
                raise ValueError("`find_lr` got no batches to train on: register a `train_loader` that has some.")
        return LrCurve.of(rates[: len(losses)], losses)

    def _is_diverged(self, losses: Sequence[float]) -> bool:
        if not losses:
            return False
        smoothed = smooth(losses)
        return not math.isfinite(losses[-1]) or smoothed[-1] > self.stop_at * min(smoothed)


@dataclass(frozen=True)
class LrCurve:
    """The losses of a range test.

    Attributes:
        rates: The learning rate of each step; where there are several parameter groups, that of the first.
        losses: The loss of each step, the mean over all workers' samples.
        smoothed: The same, smoothed.
        suggestion: The rate at which the smoothed loss falls fastest; None if it does not fall.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None

    @classmethod
    def of(cls, rates: Sequence[float], losses: Sequence[float]) -> LrCurve:
        """Makes the curve of what was measured."""
        smoothed = smooth(losses)
        return cls(tuple(rates), tuple(losses), tuple(smoothed), _steepest(rates, smoothed))

    def plot(self, path: Any) -> None:
        """Draws the curve to an image file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = require("matplotlib.figure", extra="plot", purpose="`LrCurve.plot`").Figure(figsize=(7, 4.5))
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="0.8", label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="tab:red", linestyle=":", label=f"suggestion: {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        figure.savefig(path, bbox_inches="tight")

    def __repr__(self) -> str:
        told = "none" if self.suggestion is None else f"{self.suggestion:.2g}"
        between = f" from {self.rates[0]:.2g} to {self.rates[-1]:.2g}" if self.rates else ""
        return f"LrCurve({len(self.rates)} steps{between}, suggestion: {told})"


def smooth(losses: Sequence[float]) -> list[float]:
    """An exponential moving average that gives the first values their full weight.

    >>> smooth([4.0, 4.0, 2.0])[:2]
    [4.0, 4.0]
    """
    average, smoothed = 0.0, []
    for index, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smoothed.append(round(average / (1 - _SMOOTHING**index), 12))
    return smoothed


def _steepest(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    finite = [loss for loss in smoothed if math.isfinite(loss)]
    lowest = int(np.argmin(finite)) + 1 if finite else 0
    if lowest < _FEWEST_FOR_A_SUGGESTION:
        return None
    slopes = np.gradient(finite[:lowest], np.log(rates[:lowest]))
    return rates[int(np.argmin(slopes))] if slopes.min() < 0 else None


def _means(losses: Sequence[Sequence[Loss]]) -> list[float]:
    """The mean of each step over all workers."""
    means = []
    for step in zip(*losses, strict=False):
        total = math.fsum(weight for _, weight in step)
        means.append(sum(loss * weight for loss, weight in step if weight) / total if total else math.nan)
    return means
