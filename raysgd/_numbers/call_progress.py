"""The progress of a running call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ProgressKind = Literal["train", "validation", "test", "predict"]


@dataclass(frozen=True)
class CallProgress:
    """The progress of a running call, seen from rank 0.

    Attributes:
        num_steps: Batches that it has drawn.
        total: How many there are; None if that is not known.
        epoch_idx: The pass over the train data, from 0.
        num_epochs: How many there will be; None if that is not known.
        loss: `train_loss` of the last batch, `val_loss` in an evaluation; None where there is none.
        kind: What the call does.
        metrics: All numbers that the last batch reported, by name.
        is_done: Whether the call has returned.
    """

    num_steps: int
    total: int | None
    epoch_idx: int
    num_epochs: int | None
    loss: float | None
    kind: ProgressKind = "train"
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_done: bool = False
