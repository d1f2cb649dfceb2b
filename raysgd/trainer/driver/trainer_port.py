"""`TrainerPort`: the part of a trainer that a call to `fit` uses. `FitProgress`: the progress of a call to `fit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd.callbacks.callback import Run
from raysgd.callbacks.sidecar import Sidecar
from raysgd.core.engine.shared.call import CallHandle
from raysgd.core.engine.snapshots import Snapshot
from raysgd.core.history.history import History
from raysgd.core.text.log_lines import Once
from raysgd.storage.background_writer import SubmittedWrite
from raysgd.trainer.driver.calls import EpochCalls
from raysgd.trainer.messages.begun import BegunEpoch

FitProgress = tuple[Sidecar, Any, int | None]
"""The data that another process needs to continue a call to `fit`.

A tuple of three values: the sidecar (the run's progress, as it is also saved next to each checkpoint); the folder in
which callbacks write, or None if unknown; and the number of steps over all epochs, or None if the run does not pause
inside epochs.
"""

NoteProgress = Callable[[FitProgress], None]
"""Function that stores the progress of a call to `fit`, so that another process can continue the call."""


@dataclass(frozen=True)
class TrainerPort:
    """The attributes and methods of a trainer that `FitRun` uses.

    The trainer creates a new `TrainerPort` for each call to `fit` or `epochs`.

    Attributes:
        new_run: Creates the `Run` that callbacks receive.
        history: The trainer's history, which covers every call of the trainer.
        calls: Runs calls on the workers. Also holds the listeners that receive the progress of these calls.
        once: Remembers which warnings have been logged, so that no warning is logged twice.
        runs_worker_callbacks: True if the workers can call worker callbacks around their steps.
        use_worker_callbacks: Installs exactly the given callbacks in the workers.
        train: Trains for one epoch: `train(options, dataset=..., of_fit=True)`.
        validate: Validates once: `validate(options, dataset, of_fit=True)`.
        validates_beside: Returns True if validation can run concurrently with training.
        begin_validation: Starts a validation concurrently with training.
        after_validation: Steps the learning rate schedulers that depend on validation metrics. Returns True if this
            has changed the training state.
        save: Saves the trainer to a file.
        load: Loads a file that `save` has written.
        note_progress: Stores the run's progress in a detached trainer, which outlives its program; None for other
            trainers.
        left_file: File to which a detached trainer saves itself if it ends after its program has exited; None for other
            trainers.
        leaves_epochs: True if a run can stop inside an epoch, and later continue there.
        epoch_obstacle: Returns the reason why an interrupted epoch must start over, or None if it can continue.
        save_behind: Saves the trainer in a background thread, and returns the write.
        save_snapshot: Writes a snapshot that the driver already has to a file. A snapshot is a copy of the training
            state.
        place_in: Returns the number of completed epochs in a snapshot, and its number of steps over all epochs.
        settings: Returns the settings with which the trainer created its operators in the workers.
        kept: If this process reattaches to a detached trainer, the progress that the previous process stored; otherwise
            None.
        begun: The epoch that the previous run left unfinished, or None.
        note_begun: Stores the epoch that this run left unfinished, for the next run.
    """

    new_run: Callable[..., Run]
    history: History
    calls: EpochCalls
    once: Once
    runs_worker_callbacks: bool
    use_worker_callbacks: Callable[..., None]
    train: Callable[..., Any]
    validate: Callable[..., Any]
    validates_beside: Callable[[], bool]
    begin_validation: Callable[..., CallHandle[Any]]
    after_validation: Callable[..., bool]
    save: Callable[[str], Any]
    load: Callable[[str], Any]
    note_progress: NoteProgress | None
    left_file: str | None
    leaves_epochs: bool
    epoch_obstacle: Callable[[], str | None]
    save_behind: Callable[[str], SubmittedWrite]
    save_snapshot: Callable[[str, Snapshot], None]
    place_in: Callable[[Snapshot], tuple[int, int]]
    settings: Callable[[], Any]
    kept: FitProgress | None
    begun: BegunEpoch | None
    note_begun: Callable[[BegunEpoch | None], None]
