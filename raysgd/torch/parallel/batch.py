"""`Batch`: a record of what user code and the library have done with a batch of a training call."""

from __future__ import annotations

from typing import Any


class Batch:
    """What user code and the library have done with one batch on one rank. A `BatchPlan` says how the batch counts.

    User code may also run backward passes before the first batch of a leg and after its last batch. For those times,
    there is a `Batch` that stands for no batch of the data.

    Args:
        number: Number of batches that training code has requested in the leg, including this batch; 0 before the first
            batch.

    Attributes:
        number: Number of batches that training code has requested in the leg, including this batch.
        needs_backward: True if the batch still needs a backward pass and its weight matters.
        had_backward: True if a backward pass was recorded.
        computed: IDs of the optimizers that have gradients of this batch but have not stepped with them yet.
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
        "is_by_samples",
        "is_exchanged",
        "left_out",
        "needs_backward",
        "number",
        "was_asked_to_step",
    )

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.needs_backward = self.had_backward = self.is_by_samples = False
        self.is_exchanged = self.was_asked_to_step = False
        self.computed: set[int] = set()
        self.left_out: set[int] = set()
        self.amounts: list[Any] = []
        self.has_uncounted: Any = False

    def end(self) -> Batch:
        """End the last batch of a leg or window, and return the `Batch` for the time after it.

        The returned object keeps the record of this batch's backward passes.
        """
        after = Batch(self.number)
        after.had_backward, after.computed = self.had_backward, self.computed
        after.is_exchanged, after.left_out = self.is_exchanged, self.left_out
        after.was_asked_to_step = self.was_asked_to_step
        return after
