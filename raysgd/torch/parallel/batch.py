"""`Batch`, a batch of a training call with a record of what was done with it, and its weight in an optimizer step.

The *amount* of a batch is its number of samples, the weight that user code passed to its backward pass, or the number
of labels over which a PyTorch loss averages. A step's gradient is the mean over all batches and ranks, weighted by
amount:

    gradient = sum of (amount * gradient) over all batches and ranks / sum of the amounts

If a step has one batch on each rank, a communication hook multiplies the gradients by the batch's weight before they
are sent to the other ranks: by its share of the samples (`Leg.outgoing`), or by its number of labels (`Counted`). This
works even if user code runs the backward pass. If a step has several batches (a *window*), a hook would see only the
sum of their gradients. In this case, the loss of each batch is multiplied by the batch's amount, and the summed
gradient is divided by the sum of all amounts before the step.

ADR 3 explains why a gradient is weighted by its samples, its labels, or a weight that user code passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Batch:
    """The size and weight of one batch on one rank, and what user code and the library have done with the batch.

    A leg is the part of a training call that one worker group runs. A global batch consists of the batches on which all
    ranks train at the same time. A rank may split its share of a global batch into parts, each of which is a `Batch`.
    User code may also run backward passes before the first batch of a leg and after its last batch. For those times,
    there is a `Batch` that stands for no batch of the data.

    Args:
        weight: Factor for this rank's gradient in the mean over the ranks, if the batch is the only batch of its step.
        num_samples: Number of this rank's samples; 0 for padding, None if unknown.
        total: Number of samples by which the batch is weighted in its step; None without gradient accumulation.
        number: Number of batches that training code has requested in the leg, including this batch; 0 before the first
            batch.
        index: Number of global batches of the step that are complete after this batch.
        is_last_part: True if the global batch ends with this batch.
        is_boundary: True if the optimizer step ends with this batch. Always True without accumulation.

    Attributes:
        weight, num_samples, total, number, index, is_last_part, is_boundary: Values of the arguments with these names.
        is_padding: True if the batch has no samples that count and exists only so that this rank takes part in the
            other ranks' collectives.
        needs_backward: True if the batch still needs a backward pass and its weight matters.
        had_backward: True if a backward pass was recorded.
        computed: IDs of the optimizers that have gradients of this batch but have not stepped with them yet.
        weights: Weights that user code passed to the batch's backward passes.
        amounts: For each call of the criterion, the number of labels or other amount over which it averaged.
        has_uncounted: True if a loss ignored labels or weighted them unequally, and user code passed no weight. A
            tensor if the value is on a GPU.
        is_by_samples: True if a backward pass was weighted by the batch's number of samples.
        is_exchanged: True if the batch's last gradients were sent to the other ranks.
        was_asked_to_step: With accumulation, True if `optimizer_step` was called for this batch.
        left_out: IDs of the optimizers that must not step, because all samples in their gradients were skipped.
    """

    __slots__ = (
        "amounts",
        "computed",
        "had_backward",
        "has_uncounted",
        "index",
        "is_boundary",
        "is_by_samples",
        "is_exchanged",
        "is_last_part",
        "is_padding",
        "left_out",
        "needs_backward",
        "num_samples",
        "number",
        "total",
        "was_asked_to_step",
        "weight",
        "weights",
    )

    def __init__(
        self,
        weight: float = 1.0,
        num_samples: int | None = None,
        total: int | None = None,
        *,
        number: int = 0,
        index: int = 0,
        is_last_part: bool = True,
        is_boundary: bool = True,
    ) -> None:
        self.weight, self.num_samples, self.total = weight, num_samples, total
        self.number, self.index = number, index
        self.is_last_part, self.is_boundary, self.is_padding = is_last_part, is_boundary, num_samples == 0
        self.needs_backward = self.had_backward = self.is_by_samples = False
        self.is_exchanged = self.was_asked_to_step = False
        self.computed: set[int] = set()
        self.left_out: set[int] = set()
        self.weights: list[float] = []
        self.amounts: list[Any] = []
        self.has_uncounted: Any = False

    def end(self) -> Batch:
        """End the last batch of a leg or window, and return the `Batch` for the time after it.

        The returned object keeps the record of this batch's backward passes.
        """
        after = Batch(number=self.number, index=self.index, is_last_part=self.is_last_part)
        after.had_backward, after.computed = self.had_backward, self.computed
        after.is_exchanged, after.left_out = self.is_exchanged, self.left_out
        after.was_asked_to_step = self.was_asked_to_step
        return after

    @property
    def samples(self) -> int | None:
        """Number of this rank's samples, or `total` if the number is unknown. None if both are unknown."""
        return self.total if self.num_samples is None else self.num_samples

    def claim_rows(self) -> bool:
        """Return True if the ranks must exchange their metrics now, which they do once per optimizer step.

        Called when the last gradients of a backward pass are about to be sent.
        """
        is_first, self.is_exchanged = not self.is_exchanged, True
        return is_first and self.is_boundary


@dataclass
class Window:
    """The batches whose gradients are accumulated for an optimizer step, with their amounts.

    Attributes:
        is_weighted: True if the amounts are weights or numbers of labels, False if they are numbers of samples.
        reference: Typical amount, the same on all ranks. Each amount is divided by this number before it multiplies a
            loss. This keeps the scale of losses roughly the same.
        own: Sum of the amounts of this rank's batches so far.
        total: Sum of the amounts of all ranks' batches so far, if the amounts are numbers of samples. Otherwise 0,
            because this rank does not have the amounts of the other ranks.
        num_batches: Number of batches so far.
        last: Sequence number and weight of the latest batch.
        is_exchanged: True if the gradients are already averaged over the ranks, because their all-reduce was not
            deferred to the last batch.
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
        """Return the factor by which to multiply the summed gradients before the step.

        Args:
            seen: Sum of the amounts of all ranks' batches. If it is 0, the factor is 0.
            num_ranks: Number of ranks.
        """
        return self.reference * num_ranks / seen if seen else 0.0


class Counted:
    """The amount of a batch that is not weighted by its number of samples, and the sum of all ranks' amounts.

    Args:
        amount: Amount of this rank's batch, such as its number of labels; 0 for padding.
        reference: Typical amount, the same on all ranks, by which amounts are divided. If all amounts equal the
            reference, all gradients are multiplied by exactly 1, so there is no rounding error.
        num_ranks: Number of ranks.
        wait: Function that waits for the sum of all ranks' amounts and returns the sum. Called if the amounts were not
            sent together with the gradients.

    Attributes:
        amount: Amount of this rank's batch.
        reference: Typical amount, by which amounts are divided.
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
        """Amount of this rank's batch, in a list to send to the other ranks along with the gradients."""
        return [self.amount]

    def learn(self, told: Sequence[Sequence[float]]) -> None:
        """Compute the sum of all ranks' amounts from the amounts that this rank received with the gradients.

        Args:
            told: By rank, the list of numbers that the rank sent along with its gradients.
        """
        self._total = sum(float(each) for (each,) in told)

    def divisor(self, num_ranks: int) -> Any:
        """Return the divisor for the sum of the ranks' gradients, each multiplied by its `amount / reference`.

        Args:
            num_ranks: Number of ranks.
        """
        return self.total / self.reference or 1.0

    def factor(self) -> Any:
        """Return the factor by which to multiply this rank's gradients before they are averaged over the ranks.

        The factor is 0 if the sum of all ranks' amounts is 0.
        """
        share = self.amount * self._num_ranks
        if isinstance(self.total, torch.Tensor):
            return torch.nan_to_num(share / self.total)
        return share / self.total if self.total else 0.0


class Omitted:
    """Counts the samples that user code skips in an optimizer step.

    In the step's mean gradient, skipped samples have gradients of zero. The counts are used to correct the mean. A
    global batch consists of the batches on which all ranks train at the same time. With gradient accumulation, a step
    has several global batches.

    Args:
        size: Largest number of global batches in the step.

    Attributes:
        own: Number of samples that this rank skips in each global batch.
        is_known: True if this rank knows how many samples all ranks skip.
    """

    def __init__(self, size: int) -> None:
        self.own, self._drawn = [0.0] * size, [0.0] * size
        self.learn([self.own])

    def note(self, index: int, num_drawn: float, num_omitted: float) -> None:
        """Record the samples of one batch.

        Args:
            index: Index of the batch's global batch within the step.
            num_drawn: Number of samples in the global batch, over all ranks.
            num_omitted: Number of samples that this rank skips in the batch.
        """
        self._drawn[index] += num_drawn
        self.own[index] += num_omitted
        self.is_known = False

    def learn(self, told: Sequence[Sequence[float]]) -> None:
        """Compute how many samples all ranks skip, from the numbers that were received with the gradients.

        Args:
            told: By rank, the list of numbers that the rank sent along with its gradients.
        """
        self._of_all, self.is_known = [sum(map(float, each)) for each in zip(*told, strict=True)], True

    def divisor(self, num_ranks: int) -> float:
        """Return the divisor for the sum of the ranks' gradients. `correction` is applied later, before the step."""
        return float(num_ranks)

    @property
    def correction(self) -> float:
        """Factor by which to multiply the step's gradients; 0 if all samples of the step are skipped.

        A step may consist of several global batches. If all samples of one of them are skipped, but other samples of
        the step are not, the mean counts that global batch as a gradient of 0, as Lightning does.
        """
        drawn = self._drawn
        kept = [all_of_it - left for all_of_it, left in zip(drawn, self._of_all, strict=True)]
        counted = [each if each > 1e-9 * drawn[index] else 0.0 for index, each in enumerate(kept)]
        return sum(drawn) / sum(each or drawn[index] for index, each in enumerate(counted)) if any(counted) else 0.0
