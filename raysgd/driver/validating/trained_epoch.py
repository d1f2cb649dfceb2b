"""An epoch of a run that was trained, until its result is complete: its validation may still run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raysgd.engine.shared.call import CallHandle
from raysgd.history.history import CallRecord
from raysgd.history.recording import RecordBeside


@dataclass
class TrainedEpoch:
    """An epoch that was trained.

    Attributes:
        number: Its number in the run, from 1.
        trained: What the training call returned.
        row: Its row in the history of the run.
        shown: Its row in the history of the trainer.
        handle: Of its validation, if that runs beside the training.
        ended: Adds what that has come to to the history of the trainer, as soon as it is known.
        is_told: Whether callbacks know the result.
    """

    number: int
    trained: Any
    row: dict[str, Any]
    shown: dict[str, Any]
    handle: CallHandle[Any] | None = None
    ended: list[Callable[[], CallRecord]] = field(default_factory=list)
    is_told: bool = False

    def note(self, add: RecordBeside, result: Any, began_at: float, seconds: float) -> None:
        """Notes what the validation has come to; called in its thread."""
        self.ended.append(partial(add, result, began_at, seconds))
