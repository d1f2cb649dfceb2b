"""The call that a replica is in, and how far that call is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from raysgd._numbers.results import CallProgress, ProgressKind

_PHASES = {"train": "training", "validation": "validating", "test": "testing", "predict": "predicting"}


class BatchCounter(Protocol):
    """Something that counts batches, such as a stream of them."""

    num_steps_taken: int
    source: Any


@dataclass(frozen=True)
class RunningCall:
    """The call that a replica is in.

    Attributes:
        stream: Where its batches come from.
        began_at: Batches that the stream had given out before.
        num_steps: How many to take; None for all.
        info: What the operator is told.
        kind: What the call does.
    """

    stream: BatchCounter
    began_at: int
    num_steps: int | None
    info: Mapping[str, Any]
    kind: ProgressKind

    @property
    def phase(self) -> str:
        """The phase of the call, in a word."""
        return _PHASES[self.kind]

    def progress(self, metrics: Mapping[str, float], epoch: int) -> CallProgress:
        """Returns how far it is."""
        total = self.num_steps if self.num_steps is not None else self.stream.source.num_steps()
        return CallProgress(
            num_steps=self.stream.num_steps_taken - self.began_at,
            total=total,
            epoch_idx=self.info.get("epoch_idx", epoch),
            num_epochs=self.info.get("num_epochs"),
            loss=metrics.get("train_loss" if self.kind == "train" else "val_loss"),
            kind=self.kind,
            metrics=metrics,
        )
