"""The progress of a `LightningModule` in its training, counted as Lightning counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY = "raysgd_progress"


class LightningProgress:
    """Optimizer steps, which are not the batches of the library, and the batches since the epoch began.

    Args:
        counts_batches: Whether anything goes by the batches of an epoch. Only then do states carry them.

    Attributes:
        num_steps: How many steps optimizers have taken, what Lightning calls the global step.
    """

    def __init__(self, counts_batches: bool) -> None:
        self.num_steps = 0
        self._counts_batches = counts_batches
        self._num_batches = self._ahead = 0
        self._epoch: int | None = None
        self._began_at = 0

    def begin_call(self, epoch: int, num_batches: int) -> None:
        """Begins a call in an epoch, after so many batches since the start; an epoch may take several calls."""
        if num_batches != self._num_batches:  # of a state that does not resume: it is for another training
            self._ahead, self._epoch = 0, None
        self.num_steps = num_batches + self._ahead
        if epoch != self._epoch:
            self._epoch, self._began_at = epoch, num_batches

    def count_step(self) -> None:
        """Counts the step of an optimizer."""
        self.num_steps += 1

    def end_batch(self, num_batches: int) -> None:
        """Ends a batch, the last one of so many since the start."""
        self._num_batches, self._ahead = num_batches, self.num_steps - num_batches

    def batches_of_epoch(self, num_batches: int) -> int:
        """Return how many of so many batches belong to the present epoch."""
        return num_batches - self._began_at

    def state_dict(self) -> dict[str, Any]:
        """Returns what a new worker has to know and cannot tell from the number of batches; may be empty."""
        if not self._ahead and not (self._counts_batches and self._num_batches):
            return {}
        return {_KEY: [self._num_batches, self._ahead, self._epoch, self._began_at]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state; one without it comes from a module that has nothing to count."""
        default = (self._num_batches, 0, self._epoch, self._began_at)
        self._num_batches, self._ahead, self._epoch, self._began_at = state.get(_KEY, default)
