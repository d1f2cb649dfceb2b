"""One batch of a training call: what it counts by, and a log of what has happened in it."""

from __future__ import annotations

from typing import Any


class Batch:
    """A batch that was handed out. What user code does before the first one, or behind the last one, has one, too.

    Args:
        weight: Factor for this rank's gradient in the mean over the ranks, for this batch by itself.
        num_samples: This rank's samples in it, 0 when it is only there to take part in the collectives; None when
            unknown.
        total: Its samples by which it counts beside others of its step; None where that is of no interest.
        number: How many batches of the leg there were up to this one; 0 for none.
        index: How many global batches of its step are complete with it.
        is_last_part: Whether the global batch ends with this one.
        is_boundary: Whether the optimizer steps on it. Without accumulation it always does.

    Attributes:
        weight, num_samples, total, number, index, is_last_part, is_boundary: The same, for good.
        is_padding: Whether it is only there to take part in the collectives.

        is_waiting: Whether it is not trained on yet, where that matters.
        had_backward: Whether a backward pass was noted.
        computed: The optimizers, by identity, with gradients of this batch.
        weights: What its backward passes count by, if not by samples.
        amounts: What the criterion's means in it are over, if not samples.
        has_uncounted: Whether a loss left labels out, or counted some more than others, and no one has said so; a
            tensor where that is not known without waiting for a device.
        is_by_samples: Whether it counts by its samples in a backward pass, beside others.
        is_exchanged: Whether gradients were exchanged in it.
        was_asked_to_step: Whether the optimizer of a window was asked to step on it, whether it did or not.
        left_out: The optimizers, by identity, in whose gradients nothing counts, so that they are not to step.
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
        """Return what follows where no other batch does: it is none of the data, and this log goes on."""
        after = Batch(number=self.number, index=self.index, is_last_part=self.is_last_part)
        after.had_backward, after.computed = self.had_backward, self.computed
        after.is_exchanged, after.left_out = self.is_exchanged, self.left_out
        after.was_asked_to_step = self.was_asked_to_step
        return after

    @property
    def samples(self) -> int | None:
        """This rank's samples, also if no one divided them; None when unknown."""
        return self.total if self.num_samples is None else self.num_samples

    def claim_rows(self) -> bool:
        """Return whether ranks tell each other what they measured now: once, with the last gradients of a step."""
        is_first, self.is_exchanged = not self.is_exchanged, True
        return is_first and self.is_boundary
