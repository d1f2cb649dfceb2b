"""One batch of a training call: fixed facts about the batch, and a log of what happened in it."""

from __future__ import annotations

from typing import Any


class Batch:
    """Fixed facts about one batch, and a log of what happened in it.

    A `Batch` without samples stands for user code before the first batch of a leg and after the last.

    Args:
        weight: Factor for this rank's gradient in the mean over the ranks, if the batch is a step by itself.
        num_samples: Number of this rank's samples; 0 for padding, None if unknown.
        total: With accumulation, the number of samples by which the batch counts in its step; None without
            accumulation.
        number: Number of batches that the leg has drawn, including this batch; 0 if this batch is not from the data.
        index: Number of global batches of the step that are complete after this batch.
        is_last_part: True if the global batch ends with this batch.
        is_boundary: True if the optimizer step ends with this batch. Always True without accumulation.

    Attributes:
        weight, num_samples, total, number, index, is_last_part, is_boundary: The arguments.
        is_padding: True if the batch has no samples and only takes part in the collectives of the other ranks.

        is_waiting: True if the batch waits for its backward pass, and its weight matters.
        had_backward: True if a backward pass was recorded.
        computed: IDs of the optimizers that have gradients of this batch.
        weights: Weights that user code passed to the batch's backward passes.
        amounts: Amounts, such as numbers of labels, over which the criterion averaged.
        has_uncounted: True if a loss counted labels unevenly and no weight was passed. A tensor if only the device
            knows.
        is_by_samples: True if a backward pass was weighted by the batch's number of samples.
        is_exchanged: True if the batch's last gradients were sent.
        was_asked_to_step: With accumulation, True if the optimizer was asked to step on this batch.
        left_out: IDs of the optimizers that must not step, because no sample counts in their gradients.
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
        "is_waiting",
        "left_out",
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
        self.is_waiting = self.had_backward = self.is_by_samples = self.is_exchanged = self.was_asked_to_step = False
        self.computed: set[int] = set()
        self.left_out: set[int] = set()
        self.weights: list[float] = []
        self.amounts: list[Any] = []
        self.has_uncounted: Any = False

    def end(self) -> Batch:
        """Return the `Batch` for user code after the last batch. It continues this log and is not from the data."""
        after = Batch(number=self.number, index=self.index, is_last_part=self.is_last_part)
        after.had_backward, after.computed = self.had_backward, self.computed
        after.is_exchanged, after.left_out = self.is_exchanged, self.left_out
        after.was_asked_to_step = self.was_asked_to_step
        return after

    @property
    def samples(self) -> int | None:
        """Number of this rank's samples, even if the library did not shard the data; None if unknown."""
        return self.total if self.num_samples is None else self.num_samples

    def claim_rows(self) -> bool:
        """Return True if the ranks must exchange rows now, which they do once per step, with its last gradients."""
        is_first, self.is_exchanged = not self.is_exchanged, True
        return is_first and self.is_boundary
