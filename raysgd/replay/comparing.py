"""Compares the losses and norms of the same steps in two journals: same bits, rounding, or different from a step on.

The order of sums depends on the number of workers and on the machine, so two right runs differ in the last bits. These
differences grow from step to step, in some models by a factor of millions within a hundred steps, but they do not jump.
A different sample, learning rate or bit does: it changes the loss of one step by more than all differences before it.
Rarely, rounding jumps too, where it turns a ReLU on that nearly all samples leave off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from raysgd.journal.entries import Leg
from raysgd.journal.journal import Journal, StepRecord

LOSS, NORM = "loss", "norm"
_NUM_TYPICAL, _SMALL = 20, 0.01
_OF_MEANS = 2.0**-51  # a mean loss is rounded once more on each worker of a group, even if all weights have equal bits


@dataclass(frozen=True)
class Rounding:
    """The relative difference of two numbers of a step that rounding explains.

    Attributes:
        floor: Differences up to this one are rounding in any step.
        growth: A larger difference is rounding only if it is at most this many times the largest difference before it.
    """

    floor: float
    growth: float


IN_32_BITS, IN_16_BITS = Rounding(1e-5, 100), Rounding(1e-2, 20)
"""Rounding in float32, and in 16-bit precision or on a GPU, which may multiply in 19 bits.

In 36 pairs of small training runs (two and three summands per batch instead of one, 260 steps), the largest difference
so far grew in one step at most 34-fold in float32, and 6-fold in bfloat16.
"""


@dataclass(frozen=True)
class Comparison:
    """The differences of losses and gradient norms of some steps in two series of records.

    Attributes:
        step: The first step that differs more than rounding explains, or None.
        what: What differs there: "loss" or "norm". None if `step` is None.
        values: Both losses or norms of that step, or None.
        bits_at: The first step that is not bitwise equal, or None.
        largest: Largest difference between the losses of a step, relative to the loss.
        incomplete: Steps that were not compared, because their means have different weights. The weight is lower if a
            worker was lost before the driver had this worker's part of the loss.
        rounding: How much the steps may differ by rounding. None if all bits must be equal.
    """

    step: int | None
    what: str | None
    values: tuple[float, float] | None
    bits_at: int | None
    largest: float
    incomplete: tuple[int, ...]
    rounding: Rounding | None

    @property
    def cause(self) -> str:
        """The cause of other bits in steps that do not differ more than rounding explains, in words."""
        has_grown = self.rounding is not None and self.largest > self.rounding.floor
        return "which grew from step to step, as rounding does" if has_grown else "which rounding explains"


def compare(
    one: Sequence[StepRecord],
    other: Sequence[StepRecord],
    rounding: Rounding | None,
    sizes: Sequence[float] = (0.0, 0.0),
) -> Comparison:
    """Compare the records of the same steps in two series.

    Args:
        one: The records of the first series, in the order of steps.
        other: The records of the same steps in the second series.
        rounding: How much the numbers may differ by rounding. None if all bits must be equal.
        sizes: The usual size of the losses and norms. Much smaller ones consist of rounding, so they are compared with
            it.
    """
    largest, incomplete = {LOSS: 0.0, NORM: 0.0}, list[int]()
    bits_at: int | None = None
    found: tuple[int | None, str | None, tuple[float, float] | None] = None, None, None
    for first, second in zip(one, other, strict=True):
        if first.weight != second.weight:
            incomplete.append(first.step)
            continue
        for name, size in zip((LOSS, NORM), sizes, strict=True):
            values = getattr(first, name), getattr(second, name)
            if None in values or _are_same(*values):
                continue
            bits_at = first.step if bits_at is None else bits_at
            difference = _difference(*values, size)
            limit = _OF_MEANS if rounding is None else max(rounding.floor, rounding.growth * largest[name])
            if found[0] is None and difference > limit:
                found = first.step, name, values
            largest[name] = max(largest[name], difference)
    step, what, differing = found
    return Comparison(step, what, differing, bits_at, largest[LOSS], tuple(incomplete), rounding)


def records_of(journal: Journal, numbers: Iterable[int]) -> list[StepRecord]:
    """Return the records of some steps, all of which the journal must have."""
    return [journal.check_step(number) for number in numbers]


def rounding_of(legs: Iterable[Leg], *, are_exact: bool) -> Rounding | None:
    """Return how much the steps of runs may differ by rounding.

    Args:
        legs: The parts of epochs to compare, from all runs.
        are_exact: True if all bits must be equal, because of `deterministic=True`.
    """
    if are_exact:
        return None
    options = [leg.run.options for leg in legs]
    are_in_16_bits = all(each.use_fp16 or each.precision not in (None, "fp32") for each in options)
    return IN_16_BITS if are_in_16_bits or any(each.use_gpu for each in options) else IN_32_BITS


def sizes_of(journal: Journal) -> list[float]:
    """Return the medians of the first losses of a run, without their sign, and of its first gradient norms.

    0 stands for an unknown median.
    """
    records = records_of(journal, journal.numbers()[:_NUM_TYPICAL])
    columns = ([each.loss for each in records], [each.norm for each in records if each.norm is not None])
    finite = ([abs(value) for value in column if math.isfinite(value)] for column in columns)
    return [median(column) if column else 0.0 for column in finite]


def _are_same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def _difference(one: float, other: float, size: float) -> float:
    difference = abs(one - other) / max(abs(one), abs(other), _SMALL * size)
    return difference if difference == difference else math.inf  # not a number if one of them is NaN or infinite
