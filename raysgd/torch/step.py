"""Where a replica is: in which joint batch, and where that is among the batches of one optimizer step.

With gradient accumulation an optimizer step takes a *window* of batches. The gradient of the window is to be that of
one large batch, the mean over all its samples, so each batch counts by its samples:

    gradient = sum of (amount of this rank * gradient of this rank) / samples of all ranks, over the batches

How many samples a window will have is not known when it opens (the last batch of a pass is shorter). So the first
batch sets what is *expected*, every loss is divided by that, and the gradients are corrected once at the end, if the
window had fewer or more. Equal batches need no correction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def accept() -> None:
    """Lets any step count, as an answer to `Step.check`."""


def never_defer(is_deferred: bool) -> None:
    """Puts nothing off, as an answer to `Step.defer`."""


class Step:
    """The step that a replica is in; written by the stream right before it hands a batch out.

    Attributes:
        weight: Factor for this rank's gradient in the mean over the ranks, for this batch by itself.
        num_samples: This rank's samples in the batch, 0 when it is only there to take part in the collectives; None
            when unknown.
        window: How many batches make an optimizer step, fewer where the pass or the call ends first.
        is_boundary: Whether the optimizer steps on this batch. Without accumulation it always does.
        factor: With accumulation, what to multiply this batch's loss with.
        is_joint: Whether gradients are averaged over the ranks, so that all ranks' samples count.
        defer: Told before each batch, with accumulation, whether the exchange of gradients can wait for a later one.
        check: Called before a step counts as done; raises if it cannot.
        began_at: When this rank asked for the batch.
        own_s: Seconds from there to the backward pass, summed up: time that this rank spent without the others.
        is_used: Whether a backward pass of this call was noted. Code that computes gradients past the library's
            methods cannot accumulate.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.num_samples: int | None = None
        self.window = 1
        self.is_boundary = True
        self.factor = 1.0
        self.is_joint = False
        self.defer: Callable[[bool], None] = never_defer
        self.check: Callable[[], None] = accept
        self._is_confirmed = False
        self.began_at = 0.0
        self.own_s = 0.0
        self.open_call(1)

    def open_call(self, window: int) -> None:
        """Begins a call: no gradient of an earlier one is used any more."""
        self.window = window
        self.is_boundary = True
        self.is_used = False
        self._waiting: dict[int, bool] = {}  # by identity of the optimizer: whether its gradients were not exchanged
        self._index = 0
        self._expected = self._seen = 0.0
        self._total = 0
        self._is_counted = True
        self.defer(False)

    def begin(self, weight: float, num_samples: int | None, total: int | None = None, is_last: bool = True) -> None:
        """Begins a batch.

        Args:
            weight: See the attribute.
            num_samples: See the attribute.
            total: Samples of all ranks in the batch; needed with accumulation only.
            is_last: Whether no batch will follow in this pass or in this call.
        """
        self.weight, self.num_samples = weight, num_samples
        self._is_confirmed = False
        if self.window > 1:
            assert total is not None
            self._place(total if self.is_joint or num_samples is None else num_samples, is_last)

    def _place(self, total: int, is_last: bool) -> None:
        if self.is_boundary:
            self._index = 0
            if not self._waiting:
                self._expected, self._seen = float(self.window * total), 0.0
        self._index += 1
        self.is_boundary = is_last or self._index >= self.window
        self._total, self._is_counted = total, False
        amount = self.weight * total if self.is_joint else total
        self.factor = amount / self._expected if self._expected else 0.0
        self.defer(not self.is_boundary)

    def confirm(self) -> None:
        """Sees to it that the step may count as done; whatever `check` raises says that it may not."""
        if not self._is_confirmed:
            self.check()
            self._is_confirmed = True

    @property
    def is_padding(self) -> bool:
        """Whether the batch is only there to take part in the collectives."""
        return self.num_samples == 0

    @property
    def is_pending(self) -> bool:
        """Whether gradients of earlier batches wait for their optimizer step.

        While they do, the position in the data is none to go on from: go back to the last one at which they did not.
        """
        return bool(self._waiting)

    def keeps_gradients(self, optimizer: Any) -> bool:
        """Notes a backward pass for `optimizer`; returns whether it adds to gradients that wait."""
        if self.window == 1:
            return False
        if not self._is_counted:
            self._seen += self._total
            self._is_counted = True
        self.is_used = True
        is_waiting = id(optimizer) in self._waiting
        self._waiting[id(optimizer)] = not self.is_boundary
        return is_waiting

    def waits_for(self, optimizer: Any) -> bool:
        """Whether gradients wait for a step of `optimizer`."""
        return id(optimizer) in self._waiting

    def is_unexchanged(self, optimizer: Any) -> bool:
        """Whether the gradients that wait for `optimizer` are this rank's own, because their exchange was put off."""
        return self._waiting.get(id(optimizer), False)

    def correction(self) -> float:
        """What to multiply the gradients of a complete window with."""
        return self._expected / self._seen if self._seen else 1.0

    def stepped(self, optimizer: Any) -> None:
        """Notes that `optimizer` has stepped."""
        self._waiting.pop(id(optimizer), None)
