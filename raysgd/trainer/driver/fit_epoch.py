"""Trains the epochs of a call to `fit`, pauses inside them, and records the epoch that the run leaves unfinished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.calling import CallbackCalls
from raysgd.callbacks.sidecar import place_of
from raysgd.core.engine.shared.call import Call
from raysgd.core.engine.snapshots import Snapshot
from raysgd.exceptions import WorkersLostError
from raysgd.trainer.driver.calls import EpochLeft
from raysgd.trainer.driver.fit_results import EpochResults
from raysgd.trainer.driver.leaving import Leaving
from raysgd.trainer.driver.pauses import Pauses
from raysgd.trainer.driver.trainer_port import TrainerPort
from raysgd.trainer.messages import replica_calls
from raysgd.trainer.messages.begun import BegunEpoch
from raysgd.trainer.messages.epochs import EpochOptions


class EpochTraining:
    """Trains the epochs of one run, one after the other.

    Args:
        trainer: The attributes and methods of the trainer that the run uses.
        run: The run that callbacks receive.
        calls: Calls the callbacks of the run.
        results: Validates inside the epochs.
        leaving: Decides when the run must stop early.
        dataset: Data to train on instead of the registered data, or None.
        on_left: Function to call when the workers have stopped between two steps of an epoch.
        on_paused: Function to call in each pause, after the callbacks.

    Attributes:
        begun: The epoch that has been trained in part, and that `train` continues. None at the start of an epoch.
        is_lost: True if the workers' training state was lost, because all workers were lost or because a call was ended
            in the middle of a step. The driver may still have a snapshot.
        has_left: True if the run ends inside the epoch that `train` was called for.
        pauses: Decides at which steps the run pauses. None if no option needs pauses.
        known_step: If this process took over the run from a previous process, the step that the previous process stored
            last. It is used in place of asking the workers, which may still be running a call of that process. None
            as soon as this process trains, and in all other runs.
    """

    def __init__(
        self,
        trainer: TrainerPort,
        run: Run,
        calls: CallbackCalls,
        results: EpochResults,
        leaving: Leaving,
        dataset: Any,
        on_left: Callable[[], None],
        on_paused: Callable[[], None],
    ) -> None:
        self._trainer, self._run, self._calls, self._results = trainer, run, calls, results
        self._leaving, self._dataset = leaving, dataset
        self._on_left, self._on_paused = on_left, on_paused
        self.begun: BegunEpoch | None = None
        self.is_lost = self.has_left = False
        self.pauses: Pauses | None = None
        self.known_step: int | None = None

    def check_pauses(
        self, callbacks: Sequence[Callback], *, max_steps: int | None, validate_every_n_steps: int | None
    ) -> None:
        """Check that the workers can pause inside epochs.

        Args:
            callbacks: The callbacks that need pauses.
            max_steps: The user's option, or None.
            validate_every_n_steps: The user's option, or None.

        Raises:
            ValueError: The workers cannot pause inside epochs, or have nothing to validate on there.
        """
        obstacle = self._trainer.epoch_obstacle()
        if not self._trainer.leaves_epochs:
            obstacle = f"`{type(self._run.trainer).__name__}` cannot hold its workers inside an epoch"
        if self._dataset is not None:
            obstacle = "a file does not hold the place in the `dataset` of a call"
        if obstacle is not None:
            options = {"max_steps": max_steps, "validate_every_n_steps": validate_every_n_steps}
            used = [f"`{name}`" for name, value in options.items() if value is not None]
            used += [f"`{type(each).__name__}(every_n_steps=...)` and `every_minutes`" for each in callbacks[:1]]
            raise ValueError(
                f"{' and '.join(used)} cannot work here: {obstacle}. Leave them out, or loop over "
                "`trainer.train(num_steps=100)`, `trainer.validate()` and `trainer.save(path)`."
            )
        if validate_every_n_steps is not None and not self._results.can_validate:
            raise ValueError(
                f"`validate_every_n_steps={validate_every_n_steps}`: there is nothing to validate on. Register "
                "validation data in `setup`, or pass `validation_dataset`."
            )

    def train(self, options: EpochOptions) -> Any:
        """Train an epoch, or the rest of an epoch, with the pauses that are due inside it.

        Return the training call's result. Return None if the run stops inside the epoch.
        """
        can_leave = self._trainer.leaves_epochs
        asks = self._asks if can_leave and (self._leaving.may_come or self.pauses is not None) else None
        self.has_left = self.begun is not None and self.begun.owes_validation and not self._pause()
        while not self.has_left:
            hold_at, self.known_step = self._next_pause(), None
            try:
                return self._trainer.train(
                    replace(options, hold_at=hold_at),
                    dataset=self._dataset,
                    of_fit=True,
                    begun=self.begun,
                    leaves=asks,
                )
            except (EpochLeft, WorkersLostError) as left:
                self._note_left(left)
            self.has_left = self.is_lost or self._leaving.is_due() or not self._pause()
        return None

    def _asks(self) -> bool:
        """Return True if the running epoch must stop after its current step.

        It must stop if a callback asks for a pause, for example to save, or if the run must end early.
        """
        return self._leaving.is_due() or (self.pauses is not None and self.pauses.is_due)

    def _next_pause(self) -> int | None:
        """Return the number of batches after which the epoch must pause next. Return None if no pause is planned.

        The batches are counted from the start of the epoch. Called while the workers are idle.
        """
        if self.pauses is None:
            return None
        step = self.global_step()
        pause = self.pauses.next_after(step)
        return None if pause is None else pause - step + (0 if self.begun is None else self.begun.num_steps)

    def _pause(self) -> bool:
        """Validate and save, if due, while the workers wait between two steps. Return False if the run stops there."""
        begun, pauses = self.begun, self.pauses
        if begun is None or pauses is None:  # no step of the epoch was taken yet, or the run has no pauses
            return True
        if begun.owes_validation:
            self._validate(begun)
        with self._between_epochs(begun):
            for each in pauses.callbacks:
                self._calls.call(each, "_on_pause", self._run, begun.global_step)
            self._on_paused()
        if begun.is_exhausted:  # no batches are left: continue, so that the epoch is completed
            return not self._leaving.is_due()
        return not (self._run.is_stopping or self._leaving.is_due() or pauses.ends_at(begun.global_step))

    def _validate(self, begun: BegunEpoch) -> None:
        """Validate while the workers wait inside an epoch, and pass the metrics to the callbacks' `on_validation`."""
        metrics = self._results.validate_inside(begun.global_step)
        self.begun = replace(begun, owes_validation=False)
        if metrics is not None:
            with self._between_epochs(begun):
                self._calls.tell("on_validation", begun.global_step, metrics)

    @contextmanager
    def _between_epochs(self, begun: BegunEpoch) -> Iterator[None]:
        """Inside the block, show callbacks the progress of an unfinished epoch in the `run` that they receive.

        Let `run.epoch` be the number of completed epochs, and `run.step` the number of batches of the unfinished epoch.
        """
        run = self._run
        run.epoch, run.step = run.epoch - 1, begun.num_steps
        try:
            yield
        finally:
            run.epoch, run.step = run.epoch + 1, 0

    # ------------------------------------------------------------------------------------------ the unfinished epoch

    def _note_left(self, left: EpochLeft | WorkersLostError) -> None:
        """Record the step at which an epoch stopped before its end.

        Args:
            left: The exception that ended the training call: an `EpochLeft` with the state of the workers, or the loss
                of all workers.

        Raises:
            WorkersLostError: All workers were lost, and the program has received no signal that would explain the loss.
        """
        if isinstance(left, WorkersLostError) and self._leaving.signal is None:
            raise left
        self.is_lost = not isinstance(left, EpochLeft) or not left.states
        self.begun = None
        if isinstance(left, EpochLeft) and left.states and left.states[0].num_steps:
            self._on_left()
            landed = self._trainer.calls.controller.snapshots.landed
            step = 0 if landed is None else self._trainer.place_in(landed)[1]
            begun = BegunEpoch.of(left.states, seconds=left.seconds, global_step=step)
            self.begun = replace(begun, owes_validation=self._owes_validation(begun))

    def _owes_validation(self, begun: BegunEpoch) -> bool:
        """Return True if `validate_every_n_steps` requires a validation at the step where the epoch paused.

        Return False if that step is the epoch's last step and a validation follows the epoch anyway.
        """
        is_due = self.pauses is not None and self.pauses.validates_at(begun.global_step)
        return is_due and not (begun.is_exhausted and self._results.is_due(self._run.epoch))

    def go_on_inside(self, begun: BegunEpoch) -> None:
        """Let the run continue with the rest of an epoch that an earlier run left unfinished."""
        self.begun = begun
        self._run.step, self._run._global_step = begun.num_steps, begun.global_step

    def note_loss(self) -> None:
        """Record that all workers were lost, and the unfinished epoch with them."""
        self.is_lost, self.begun = True, None

    def finds_snapshot(self, newest: str | None) -> bool:
        """Return True if the last snapshot in the driver is newer than the last checkpoint file.

        Return False if the run has completed an epoch since the snapshot. Called after the workers' training state was
        lost. A snapshot is a copy of the training state that the workers sent to the driver. If the snapshot was taken
        inside an epoch, set `begun` to that epoch.

        Args:
            newest: The last checkpoint file of the run, or None if nothing was saved.
        """
        landed = self._trainer.calls.controller.snapshots.landed
        if landed is None:
            return False
        (num_epochs, global_step), progress = self._trainer.place_in(landed), landed.progress
        if progress is not None:
            self.begun = BegunEpoch.of(progress, global_step=global_step)
            num_epochs -= self.begun.is_exhausted
        place = num_epochs, 0 if self.begun is None else self.begun.num_steps
        return num_epochs == self._run.epoch and (newest is None or place > place_of(newest))

    @property
    def left_snapshot(self) -> Snapshot | None:
        """The snapshot to save in place of the workers' training state if that state was lost. Otherwise, None."""
        if not self.is_lost:
            return None
        landed = self._trainer.calls.controller.snapshots.landed
        assert landed is not None, "it was found"
        return landed

    def global_step(self) -> int:
        """Return how many batches each worker has trained on over all epochs. Called while workers are idle."""
        if self.known_step is not None:
            return self.known_step
        step: list[int] = self._trainer.calls.controller.run(Call(replica_calls.global_step, rank=0))
        return step[0]

    def epochs_done(self) -> int:
        """Return how many epochs the workers have completed. Called while workers are idle."""
        done: list[int] = self._trainer.calls.controller.run(Call(replica_calls.epochs_done, rank=0))
        return done[0]
