"""The amounts by which batches count in the gradient of an optimizer step.

An *amount* is the number of samples of a batch, the weight that user code passed to its backward pass, or the number of
labels that a PyTorch loss counts. The gradient of a step is the mean over all batches on all ranks, weighted by amount:

    gradient = sum of (amount * gradient) over all batches and ranks / sum of the amounts

If a step has one batch, a hook multiplies the gradients before they are sent to the other ranks, even if user code runs
the backward pass (`Leg.outgoing_weight`). If a step has several batches (a *window*), a hook would see the sum of their
gradients. So each loss is multiplied by its amount, and the step divides the summed gradient by the sum of all amounts.

ADR 3 explains why gradients are weighted by samples, over several batches, and by weights that users pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Window:
    """The batches whose gradients are accumulated for an optimizer step, with their amounts.

    Attributes:
        is_weighted: True if batches count by something other than samples.
        reference: Divisor of each amount, the same on all ranks, so that losses keep roughly their size.
        own: Sum of the amounts of this rank's batches.
        total: Sum of the amounts of all ranks' batches. Set only if batches count by samples, whose total all ranks
            know.
        num_batches: Number of batches.
        last: Number and weight of the last batch.
        is_exchanged: True if the gradients are already averaged over the ranks, because no all-reduce was deferred.
        is_of_criterion: True if the amounts come from the criterion, False if they come from user code.
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
        """Return the factor for the gradients at the step, or 0 if `seen`, the sum of all ranks' amounts, is 0."""
        return self.reference * num_ranks / seen if seen else 0.0


class Counted:
    """The amount of a batch that does not count by its samples, and the sum of all ranks' amounts.

    Args:
        amount: Amount of this rank's batch; 0 for padding.
        reference: Divisor of the amounts, the same on all ranks. With equal amounts, it leaves gradients bit-identical.
        num_ranks: Number of ranks.
        wait: Returns the sum of all ranks' amounts. Called if the amounts were not sent with the gradients.

    Attributes:
        amount, reference: The arguments.
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
        """Sum of all ranks' amounts. The first read is a collective operation, in which all ranks must take part."""
        if self._total is None:
            self._total = self._wait()
        return self._total

    @property
    def own(self) -> list[float]:
        """The values that this rank sends to the other ranks."""
        return [self.amount]

    def learn(self, told: Sequence[Sequence[float]]) -> None:
        """Sum all ranks' amounts, which were sent with the gradients."""
        self._total = sum(float(each) for (each,) in told)

    def factor(self) -> Any:
        """Return the factor for this rank's gradients in the mean over all ranks; 0 if no amount counts."""
        share = self.amount * self._num_ranks
        if isinstance(self.total, torch.Tensor):
            return torch.nan_to_num(share / self.total)
        return share / self.total if self.total else 0.0


class Omitted:
    """The samples that ranks leave out of a step. Uncorrected, the mean would count their gradients as 0.

    Args:
        size: Largest number of global batches in the step.

    Attributes:
        own: Number of samples that this rank leaves out of each global batch.
        is_known: True if the numbers of all ranks are known.
    """

    def __init__(self, size: int) -> None:
        self.own, self._drawn = [0.0] * size, [0.0] * size
        self.learn([self.own])

    def note(self, index: int, num_drawn: float, num_omitted: float) -> None:
        """Record a batch of the global batch `index`: its samples on all ranks, and those that this rank leaves out."""
        self._drawn[index] += num_drawn
        self.own[index] += num_omitted
        self.is_known = False

    def learn(self, told: Sequence[Sequence[float]]) -> None:
        """Sum the numbers of samples that all ranks leave out, which were sent with the gradients."""
        self._of_all, self.is_known = [sum(map(float, each)) for each in zip(*told, strict=True)], True

    @property
    def correction(self) -> float:
        """Factor for the gradients; 0 if no sample counts.

        If all samples of one global batch are left out and other batches of the step count, the gradient of that global
        batch counts as 0, as with Lightning.
        """
        drawn = self._drawn
        kept = [all_of_it - left for all_of_it, left in zip(drawn, self._of_all, strict=True)]
        counted = [each if each > 1e-9 * drawn[index] else 0.0 for index, each in enumerate(kept)]
        return sum(drawn) / sum(each or drawn[index] for index, each in enumerate(counted)) if any(counted) else 0.0
