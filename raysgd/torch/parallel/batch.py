"""`Batch`: a batch of a training call, with a record of what user code and the library have done with it."""

from __future__ import annotations

from typing import Any


class Batch:
    """The size and weight of one batch on one rank, and what user code and the library have done with the batch.

    A leg is the part of a training call that one worker group runs. A global batch is the batch of all ranks together.
    A rank trains on its share of the global batch as one batch, or splits the share into parts and trains on one part
    after the other. In the second case, each part is a separate `Batch`.

    A step accumulates gradients if it may have several batches of this rank, even if these are parts of a single global
    batch. However, logical shards (`deterministic=True`) do not count as gradient accumulation here.

    User code may also run backward passes before the first batch of a leg and after its last batch. For those times,
    there is a `Batch` that stands for no batch of the data.

    Args:
        weight: Factor for this rank's gradient in the mean over the ranks, if the batch is the only batch of its step.
        num_samples: Number of this rank's samples; 0 for padding, None if unknown.
        total: Number of samples by which the batch is weighted in its step; None without gradient accumulation.
        number: Number of batches that training code has requested in the leg, including this batch; 0 before the first
            batch.
        index: With gradient accumulation, number of global batches of the step that are complete after this batch. Only
            the last part of a global batch completes it. Always 0 without gradient accumulation.
        is_last_part: True if the global batch ends with this batch.
        is_boundary: True if the optimizer step ends with this batch. Always True without gradient accumulation and
            without logical shards.

    Attributes:
        weight, num_samples, total, number, index, is_last_part, is_boundary: Values of the arguments with these names.
        is_padding: True if the batch has no samples that count and exists only so that this rank takes part in the
            other ranks' collectives.
        needs_backward: True if the batch still needs a backward pass and its weight matters.
        had_backward: True if a backward pass was recorded.
        computed: IDs of the optimizers that have gradients of this batch but have not stepped with them yet.
        weights: Weights of the batch in its backward passes. They come from user code or from the labels. Weights that
            are tensors are left out, and passes that are weighted by the number of samples add no weight.
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
