"""Two sums for each weight of a replica, to detect replicas that are no longer in sync. No I/O.

They are the sum and the sum of squares of the weight's elements. Ranks in sync may still round differently, on
different processors or with different numbers of threads. The tolerance allows for that. With `deterministic=True`, the
sums are taken over the elements' bits and must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysgd.core.text.log_lines import named
from raysgd.exceptions import RanksDifferError

_TOLERANCE = 1e-4  # 100 times the difference that different kernels caused between ranks after 8,000 steps
_TOLERANCES_OF_SHORT = {1: 1.0, 2: 0.3}  # by bytes per element; in bfloat16, ranks in sync differed by 0.14
_SMALLEST = 1e-3  # relative to the norm of all weights: a weight with a smaller norm may be noise around 0
_SHARE = 0.005  # fraction of time to spend on comparisons; with comparisons at snapshots, the total stays below 1 %
_MOST_NAMES = 3
_CHUNK = 1 << 16  # elements that are converted at once, which takes half a megabyte

REASONS_OF_TORCH = (
    "gradients that bypass `DistributedDataParallel`, as with `self.model.module(...)` or `torch.autograd.grad` (call "
    "`self.model(...)`, and `self.backward(loss)` or `loss.backward()`); a second backward pass "
    "of one forward pass (add the losses up)"
)
_ADVICE = (
    "Replicas that exchange gradients have to stay in sync. Likely reasons: {reasons}; random numbers or learning "
    "rates that differ between workers; a batch that some workers skipped. {way_out}"
)
_WAY_OUT = (
    "The next call, or `load`, begins with the last snapshot. If your workers are to differ, set "
    "`compares_ranks = False` in your operator class, or `self.compares_ranks = (self.model,)` in `setup`, with the "
    "models to compare."
)


@dataclass(frozen=True)
class WeightSums:
    """The sums of one rank's weights.

    Attributes:
        names: Names of the weights and their models. Keras counts objects in each process, so the same weight may have
            different names on different ranks.
        shapes: Shapes of the weights.
        numbers: The sums, one row per weight. Integers are compared exactly.
        tolerances: Allowed relative difference of floating-point sums, by weight.
        seconds: Time that computing the sums took.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numbers: np.ndarray[Any, Any]
    tolerances: tuple[float, ...]
    seconds: float


class ComparisonPace:
    """Decides after which training calls to compare the ranks' weights if no snapshot does.

    Budget: 0.5 % of the time.
    """

    def __init__(self) -> None:
        self._cost_s = self._since_s = 0.0

    @property
    def is_due(self) -> bool:
        """True if the time budget allows a comparison after the next call."""
        return self._cost_s <= _SHARE * self._since_s

    def note_call(self, seconds: float, costs_s: Sequence[float]) -> None:
        """Record the duration of a call and, if a comparison followed, its duration on each rank."""
        if costs_s:
            self._cost_s, self._since_s = max(costs_s), 0.0
        self._since_s += seconds


def models_to_compare(models: Sequence[Any], compares_ranks: Any) -> list[tuple[int, Any]]:
    """Return the registered models that the operator's `compares_ranks` selects, with their numbers starting at 1.

    Raises:
        ValueError: `compares_ranks` is neither a bool nor a sequence of registered models.
    """
    chosen = models if compares_ranks is True else () if compares_ranks is False else compares_ranks
    ids = {id(each) for each in chosen} if isinstance(chosen, tuple | list) else {0}
    if not ids <= {id(model) for model in models}:
        raise ValueError(
            f"`compares_ranks={compares_ranks!r}`: allowed are True, False and a tuple of registered models, as in "
            "`self.compares_ranks = (self.model,)`."
        )
    return [(number, model) for number, model in enumerate(models, start=1) if id(model) in ids]


def tolerance_of(num_bytes: int) -> float:
    """Return the allowed relative difference between ranks for weights with `num_bytes` bytes per element."""
    return _TOLERANCES_OF_SHORT.get(num_bytes, _TOLERANCE)


def sums_of_array(array: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the sum and the sum of squares of an array."""
    total = squares = 0.0
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype(np.float64)
        total, squares = total + float(part.sum()), squares + float(part @ part)
    return total, squares


def check_equal(told: Mapping[int, WeightSums | None], reasons: str, way_out: str = _WAY_OUT) -> None:
    """Check that the ranks' weights are in sync. If the sums of a rank are missing, nothing is compared.

    Args:
        told: The sums of each rank; None for a rank that did not compute sums.
        reasons: Likely reasons for a difference in this framework.
        way_out: Advice for the user.

    Raises:
        RanksDifferError: The weights differ.
    """
    sums = {rank: each for rank, each in told.items() if each is not None}
    found = _difference(sums) if len(sums) == len(told) > 1 else ""
    if found:
        advice = _ADVICE.format(reasons=reasons, way_out=way_out)
        raise RanksDifferError(f"The workers' models are no longer in sync: {found}. {advice}")


def _difference(sums: Mapping[int, WeightSums]) -> str:
    first, *others = sorted(sums)
    own = sums[first]
    odd = [rank for rank in others if sums[rank].shapes != own.shapes]
    if odd:
        return f"{named(odd)} have other parameters than rank {first}"
    apart = {rank: _apart(own, sums[rank]) for rank in others}
    ranks_of = [[rank for rank in others if apart[rank][index]] for index in range(len(own.names))]
    found = [f"{name} on {named(ranks)}" for name, ranks in zip(own.names, ranks_of, strict=True) if ranks]
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return f"compared with rank {first}, these differ: {', '.join(found[:_MOST_NAMES])}{more}" if found else ""


def _apart(one: WeightSums, other: WeightSums) -> Sequence[bool]:
    """Return a flag for each weight that is True if the two ranks differ in it.

    Differences are relative to the weight's norm, because its sum may be near 0 even if its elements are not.
    """
    these, those = one.numbers, other.numbers
    is_same = (these == those) | (np.isnan(these) & np.isnan(those))
    if these.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            sizes, distances = np.maximum(np.abs(these), np.abs(those)), np.abs(these - those)
            squares = sizes[:, 1].copy()
            sizes[:, 1] = np.maximum(squares, _SMALLEST**2 * squares.sum(where=np.isfinite(squares)))
            sizes[:, 0] += np.sqrt(sizes[:, 1])
            is_same |= np.isfinite(distances) & (distances <= np.array(one.tolerances)[:, None] * sizes)
    apart: Sequence[bool] = (~is_same.all(axis=1)).tolist()
    return apart
