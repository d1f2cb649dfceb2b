"""Compares the ranks of a group: their weights, and the actions, such as all-reduces, that they took in a call.

All ranks must take the same actions in the same order. Otherwise, they wait for each other forever, or their models
become different.

Instead of the weights, two sums per weight tensor are compared: the sum of its elements, and the sum of their squares.
Equal models may still round differently on different processors or with different numbers of threads, so small
differences are tolerated. With `deterministic=True`, the sums are computed from the bits of the elements and must be
equal. This module does no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysgd.core.text.log_lines import named
from raysgd.exceptions import RanksDifferError


@dataclass(frozen=True)
class JointWork:
    """Record of the all-reduces and similar actions of one rank in a training call.

    All ranks must take the same actions in the same order.

    Attributes:
        counts: How many times the rank has taken each kind of action, by the action's name.
        marks: Hashes of the sequence of actions. The last hash covers all actions so far. Each earlier hash covers one
            action less than the hash after it.
        is_over: True if the training call has ended on this rank.
        number: Number of the training call, counted from when the group of workers formed.
    """

    counts: Mapping[str, int]
    marks: tuple[int, ...]
    is_over: bool = True
    number: int = 1

    @property
    def num(self) -> int:
        """Total number of actions that the rank has taken."""
        return sum(self.counts.values())

    def can_become(self, other: JointWork) -> bool:
        """Return True if this rank can catch up, because the other rank's actions begin with this rank's actions.

        Also return True if this rank is so far behind that `other` has no hash to compare with. Return False if the
        other rank has taken more actions, but the training call has already ended on this rank.

        Args:
            other: Record of a rank that has taken at least as many actions.
        """
        num_behind = other.num - self.num
        if self.is_over and num_behind:
            return False
        return num_behind >= len(other.marks) or other.marks[-1 - num_behind] == self.marks[-1]


def difference(by_rank: Mapping[int, Any]) -> str:
    """Describe how the actions of ranks in a training call differ.

    Return an empty string if all ranks have taken the same actions, or if the ranks that are behind can still catch up.

    Args:
        by_rank: The latest progress report, answer or failure of each rank, by rank. Ranks without a `joint_work` are
            ignored, and so are ranks whose report is from an earlier call.
    """
    known = {rank: work for rank, each in by_rank.items() if (work := getattr(each, "joint_work", None)) is not None}
    newest = max((work.number for work in known.values()), default=0)
    works: dict[int, JointWork] = {rank: work for rank, work in known.items() if work.number == newest}
    most = max(works.values(), key=lambda work: work.num, default=None)
    if most is None or all(work.can_become(most) for work in works.values()):
        return ""
    return (
        f"The workers did not do the same in a call: {_told(works)}. Replicas that exchange gradients have to compute "
        "and apply the same ones in the same order. Let the branches of your code follow from what is equal on all "
        'workers, such as a mean over them, and not from a batch or a rank. Or pass `strategy="none"` and keep the '
        "replicas equal yourself."
    )


def _told(works: Mapping[int, JointWork]) -> str:
    names = sorted({name for work in works.values() for name in work.counts})
    uneven = [name for name in names if len({work.counts.get(name, 0) for work in works.values()}) > 1]
    if not uneven:
        return f"{', '.join(names)} as often on all of them, but in another order"
    ranks = defaultdict(list)
    for rank, work in sorted(works.items()):
        ranks[", ".join(f"{name} {_times(work.counts.get(name, 0))}" for name in uneven)].append(rank)
    return "; ".join(f"on {named(those)} {did}" for did, those in ranks.items())


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# Allowed relative difference. In a measurement, two trainings of one model differed by 1e-6 after 8,000 steps, because
# they used different kernels.
_TOLERANCE = 1e-4
# Allowed relative difference for weights with 1 or 2 bytes per element. In the same measurement with bfloat16, the two
# trainings differed by 0.14.
_TOLERANCES_OF_SHORT = {1: 1.0, 2: 0.3}
# Differences in a tensor are relative to the tensor's norm. If this norm is smaller than the following fraction of the
# norm of all weights, the elements may be noise around 0. The differences are then relative to this part of the norm of
# all weights instead.
_SMALLEST = 1e-3
# Fraction of the time of training calls to spend on comparisons. It does not limit the comparisons at snapshots.
_SHARE = 0.005
_MOST_NAMES = 3
_CHUNK = 1 << 16  # number of elements to convert to float64 at a time, in half a megabyte

REASONS_OF_TORCH = (
    "gradients that bypass `DistributedDataParallel`, as with `self.model.module(...)` or `torch.autograd.grad` (call "
    "`self.model(...)`, and `self.backward(loss)` or `loss.backward()`); a second `loss.backward()` after the forward "
    "passes (add the losses up, or call `self.backward` for each); an optimizer that steps in a hook, inside the "
    "backward pass, where gradients are not averaged yet (step it after `self.backward(loss)`)"
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
    """The sums of the weights of one rank.

    Attributes:
        names: Names of the weight tensors and their models. Keras counts objects in each process, so the same tensor
            may have different names on different ranks.
        shapes: Shapes of the weight tensors.
        numbers: The sums, one row per weight tensor. Integers are compared exactly.
        tolerances: For each weight tensor, the allowed relative difference of floating-point sums.
        seconds: Seconds that it took to compute the sums.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    numbers: np.ndarray[Any, Any]
    tolerances: tuple[float, ...]
    seconds: float


class ComparisonPace:
    """Decides after which training calls to compare the weights of all ranks.

    The comparisons after these calls take at most about 0.5 % of the time that training calls take. In addition, the
    weights are compared at each snapshot.
    """

    def __init__(self) -> None:
        self._cost_s = self._since_s = 0.0

    @property
    def is_due(self) -> bool:
        """True if the last comparison was long enough ago that weights should be compared after the next call."""
        return self._cost_s <= _SHARE * self._since_s

    def note_call(self, seconds: float, costs_s: Sequence[float]) -> None:
        """Record how long a training call took.

        Args:
            seconds: Duration of the training call.
            costs_s: For each rank, the seconds spent on computing sums after the call. Empty if no weights were
                compared.
        """
        if costs_s:
            self._cost_s, self._since_s = max(costs_s), 0.0
        self._since_s += seconds


def models_to_compare(models: Sequence[Any], compares_ranks: Any) -> list[tuple[int, Any]]:
    """Return the models whose weights must be equal on all ranks, each with its number, starting at 1.

    Args:
        models: The models that the operator registered.
        compares_ranks: The operator's attribute of this name, which selects models.

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
    """Return by how much the sums of a weight tensor may differ between ranks, as a fraction.

    Args:
        num_bytes: Number of bytes per element of the tensor.
    """
    return _TOLERANCES_OF_SHORT.get(num_bytes, _TOLERANCE)


def sums_of_array(array: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the sum of the elements of an array, and the sum of their squares."""
    total = squares = 0.0
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype(np.float64)
        total, squares = total + float(part.sum()), squares + float(part @ part)
    return total, squares


def check_equal(by_rank: Mapping[int, WeightSums | None], reasons: str, way_out: str = _WAY_OUT) -> None:
    """Check that all ranks have the same weights. If the sums of a rank are missing, nothing is compared.

    Args:
        by_rank: The sums of each rank, or None for a rank that did not compute sums.
        reasons: Likely reasons for a difference in this framework, for the error message.
        way_out: Advice for the user, for the error message.

    Raises:
        RanksDifferError: The weights differ by more than the tolerance, or the shapes of the tensors differ.
    """
    sums = {rank: each for rank, each in by_rank.items() if each is not None}
    difference = _difference(sums) if len(sums) == len(by_rank) > 1 else ""
    if difference:
        advice = _ADVICE.format(reasons=reasons, way_out=way_out)
        raise RanksDifferError(f"The workers' models are no longer in sync: {difference}. {advice}")


def _difference(sums: Mapping[int, WeightSums]) -> str:
    first, *others = sorted(sums)
    own = sums[first]
    odd = [rank for rank in others if sums[rank].shapes != own.shapes]
    if odd:
        return f"{named(odd)} have other parameters than rank {first}"
    apart = {rank: _apart(own, sums[rank]) for rank in others}
    ranks_of = [[rank for rank in others if apart[rank][index]] for index in range(len(own.names))]
    differing = [f"{name} on {named(ranks)}" for name, ranks in zip(own.names, ranks_of, strict=True) if ranks]
    more = f" and {len(differing) - _MOST_NAMES} more" if len(differing) > _MOST_NAMES else ""
    return f"compared with rank {first}, these differ: {', '.join(differing[:_MOST_NAMES])}{more}" if differing else ""


def _apart(one: WeightSums, other: WeightSums) -> Sequence[bool]:
    """Return for each weight tensor whether it differs between two ranks.

    Differences of the sums are relative to the norm of the tensor, because the sum of a tensor's elements may be near 0
    although the elements are not.
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
    return (~is_same.all(axis=1)).tolist()
