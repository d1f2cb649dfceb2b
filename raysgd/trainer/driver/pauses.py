"""Decides at which steps inside epochs a call to `fit` pauses training to validate, to save, or to end. See ADR 140."""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.callbacks.callback import Callback


class Pauses:
    """Decides at which steps inside epochs the workers pause.

    A step's number is the number of batches that a worker has trained on over all epochs.

    Args:
        callbacks: The callbacks that need pauses inside epochs, for example to save a checkpoint.
        validate_every: Number of steps between validations. None to never validate inside epochs.
        last_step: The step at which the run ends, or None for no limit.
    """

    def __init__(self, callbacks: Sequence[Callback], validate_every: int | None, last_step: int | None) -> None:
        self.callbacks = callbacks
        self._validate_every, self._last_step = validate_every, last_step
        self._began_at = 0

    def next_after(self, step: int) -> int | None:
        """Return the step of the next pause after `step`, or None if no pause is planned.

        Call this method when all validations and saves that are due at `step` are done.
        """
        self._began_at, every = step, self._validate_every
        wanted = [each._pause_at(step) for each in self.callbacks]
        wanted += [None if every is None else (step // every + 1) * every, self._last_step]
        return min((each for each in wanted if each is not None and each > step), default=None)

    @property
    def is_due(self) -> bool:
        """True if a callback asks for a pause after the current step. Checked repeatedly while an epoch runs."""
        return any(each._pauses_now() for each in self.callbacks)

    def validates_at(self, step: int) -> bool:
        """Return True if a validation is due at `step`, where the run has paused."""
        every = self._validate_every
        return every is not None and step // every > self._began_at // every

    def ends_at(self, step: int) -> bool:
        """Return True if `step`, the number of steps taken so far, is the last step of the run."""
        return self._last_step is not None and step >= self._last_step
