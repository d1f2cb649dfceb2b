"""What batches count by in the mean that a step of the optimizer takes, and the arithmetic of that mean.

A batch counts by an *amount*: its samples, or the weight that user code gave to its backward pass, or the labels that a
loss of PyTorch counts. The gradient of a step is the mean over the amounts of all its batches, on all ranks:

    gradient = sum of (amount of this rank * gradient of this rank) / amounts of all ranks, over the batches

Where a step has one batch, a hook multiplies gradients on their way to the other ranks (`Leg.outgoing_weight`), also
where user code runs the backward pass. Where it has several (a *window*), each loss is multiplied by its amount, and
the sum is divided by all amounts once, at the step: a hook would see the sum of several batches.

Why gradients are weighted by samples, over several batches, and by weights of users: ADR 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Window:
    """The batches whose gradients wait for a step of the optimizer, and what they count by.

    Attributes:
        is_weighted: Whether something else than samples says how much each batch counts.
        reference: What each amount is divided by, alike on all ranks, so that losses keep about their size.
        own: The amounts of this rank's batches.
        total: Those of all ranks' batches, where samples count and so all ranks know them.
        num_batches: How many batches are in it.
        last: The batch that was counted last, and its weight.
        is_exchanged: Whether the gradients are the mean over the ranks, because no exchange was put off.
        is_of_criterion: Whether the criterion counts, and not user code.
    """

    is_weighted: bool
    reference: float
    own: float = 0.0
    total: float = 0.0
    num_batches: int = 0
    last: tuple[int, float | None] | None = None
    is_exchanged: bool = True
    is_of_criterion: bool = False

    def correction(self, seen: float, num_ranks: int) -> float:
        """Return what to multiply the gradients with, of batches of all ranks with these amounts; 0 for no amount."""
        return self.reference * num_ranks / seen if seen else 0.0


class Counted:
    """The amount that a batch of this rank counts by if not by its samples, and that of all ranks.

    Args:
        amount: That of this rank; 0 for padding.
        reference: What amounts are divided by on their way, alike on all ranks, so that equal ones change no bit.
        num_ranks: How many ranks there are.
        wait: Returns the sum of all ranks' amounts, where nothing else has brought it.

    Attributes:
        amount, reference: The same.
    """

    def __init__(self, amount: Any, reference: float, num_ranks: int, wait: Callable[[], Any]) -> None:
        self.amount, self.reference, self._num_ranks, self._wait = amount, reference, num_ranks, wait
        self._total: Any = None

    @property
    def is_known(self) -> bool:
        """True if the sum of all ranks' amounts is known."""
        return self._total is not None

    @property
    def total(self) -> Any:
        """The sum of all ranks' amounts. The first time, all ranks have to ask."""
        if self._total is None:
            self._total = self._wait()
        return self._total

    @property
    def own(self) -> list[float]:
        """What this rank tells the others."""
        return [self.amount]

    def learn(self, told: Sequence[Sequence[float]]) -> None:
        """Take notice of all ranks' amounts, which have travelled beside gradients."""
        self._total = sum(float(each) for (each,) in told)

    def factor(self) -> Any:
        """Return what to multiply this rank's gradients with in the mean over all ranks; 0 where nothing counts."""
        share = self.amount * self._num_ranks
        if isinstance(self.total, torch.Tensor):
            return torch.nan_to_num(share / self.total)
        return share / self.total if self.total else 0.0


class Omitted:
    """The samples that ranks leave out of a step. Its gradients are the mean over all samples, with 0 for these.

    Args:
        size: How many global batches the step may have.

    Attributes:
        own: How many this rank leaves out of each global batch.
        is_known: Whether all ranks' are known.
    """

    def __init__(self, size: int) -> None:
        self.own, self._drawn = [0.0] * size, [0.0] * size
        self.learn([self.own])

    def note(self, index: int, num_drawn: float, num_omitted: float) -> None:
        """Note a batch of so many samples on all ranks, and how many of them this rank leaves out."""
        self._drawn[index] += num_drawn
        self.own[index] += num_omitted
        self.is_known = False

    def learn(self, told: Sequence[Sequence[float]]) -> None:
        """Take notice of what each rank leaves out, which has travelled beside gradients."""
        self._of_all, self.is_known = [sum(map(float, each)) for each in zip(*told, strict=True)], True

    @property
    def correction(self) -> float:
        """What to multiply the gradients with; 0 where nothing counts.

        Where other batches of the step count, one without any sample that does counts as 0, as with Lightning.
        """
        drawn = self._drawn
        kept = [all_of_it - left for all_of_it, left in zip(drawn, self._of_all, strict=True)]
        counted = [each if each > 1e-9 * drawn[index] else 0.0 for index, each in enumerate(kept)]
        return sum(drawn) / sum(each or drawn[index] for index, each in enumerate(counted)) if any(counted) else 0.0
