"""The place of a replica among the batches that it was given, and the weight of its loss in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class TFStep:
    """The step that a replica is in, where our own loop hands the batches out.

    Attributes:
        num_samples: This rank's samples in the step, 0 where it has none; None where the loop is Keras's and the batch
            itself says.
        num_joint: Samples of all ranks in the step; 0 where that is not known.
        weights: The sums of the weights of this rank's samples and of those of all ranks; 0 where there are none.
        began_at: When drawing its batch began.
        usual: The exchanges of the last batch that had some, each to be repeated without samples.
    """

    num_samples: int | None = None
    num_joint: int = 0
    weights: tuple[float, float] = (0.0, 0.0)
    began_at: float = 0.0
    usual: list[Callable[[], object]] = field(default_factory=list)
    _exchanged: list[Callable[[], object]] = field(default_factory=list)
    _waiting: list[tuple[int, int]] = field(default_factory=list)
    _is_last_waiting: bool = False

    def begin(self, num_samples: int, num_joint: int, weights: tuple[float, float]) -> None:
        """Begins a batch, which is about to be handed out."""
        self.num_samples, self.num_joint, self.weights = num_samples, num_joint, weights
        if self._exchanged:
            self.usual, self._exchanged = self._exchanged, []
        self._waiting.append((num_samples, num_joint))
        self._is_last_waiting = True

    def confirm(self) -> None:
        """Ends the step: no batch is in use any more, if what was handed out was trained on."""
        if not self._waiting:
            self.num_samples = None

    def end_stream(self) -> None:
        """Says that no batch follows."""

    def forget(self) -> None:
        """Ends a call: what user code does between two of them is no step over the data."""
        self.num_samples, self._waiting, self._is_last_waiting = None, [], False

    def use(self, exchange: Callable[[], object] | None = None) -> int | None:
        """Notes that a batch is trained on, and how to repeat that; returns this rank's samples in it.

        Raises:
            RuntimeError: Batches that count differently wait, and it is unknown which one it is.
        """
        if len(set(self._waiting)) > 1:
            counts = ", ".join(str(own) for own, _ in self._waiting)
            raise RuntimeError(
                f"Batches of {counts} samples on this worker were drawn, and this step may be for each of them. Draw "
                "one batch, train on it, then draw the next; to leave one out, call `self.skip_batch()`; to draw "
                "ahead, batch with `drop_remainder=True`."
            )
        self.skip()
        if exchange is not None:
            self._exchanged.append(exchange)
        return self.num_samples

    def skip(self) -> None:
        """Says that no training follows for the batch that was drawn last; once, however often it is said."""
        if self._is_last_waiting:
            self._waiting.pop()
            self._is_last_waiting = False

    def factor(self, divisor: float | None) -> float:
        """Return what the loss is to be multiplied by, as far as the batch says; 1 where nothing is known."""
        own, joint = self.weights
        if not self.num_samples or not self.num_joint:
            return 1.0
        if divisor is None:
            return self.num_joint / self.num_samples
        return divisor / joint * self.num_joint / self.num_samples if joint and np.isclose(divisor, own) else 1.0

    is_boundary = True  # each batch is a step of the optimizer

    @property
    def is_padding(self) -> bool:
        """True if this rank has no samples in the step."""
        return self.num_samples == 0
