"""Saves a trainer to files, and loads states into all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.shared.interface import Call
from raysgd.core.engine.shared.types import World
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot, own_states
from raysgd.core.engine.transfers import SharedValue
from raysgd.exceptions import WorkersLostError
from raysgd.storage import files
from raysgd.storage.background_writer import BackgroundWriter, SubmittedWrite, Write

_END_S = 60.0

State = dict[str, Any]
Content = tuple[State, Write]
"""The training state to save, and the function that writes this state to a file."""


class FileSaves:
    """Writes the checkpoint files of one trainer.

    Args:
        controller: Controller of the workers. Its `snapshots` remember which file was written last.
        writer: Writes files in background threads.
    """

    def __init__(self, controller: ElasticController, writer: BackgroundWriter) -> None:
        self._snapshots, self._writer = controller.snapshots, writer
        self._newest: Callable[[], NewestSnapshot | None] = lambda: None
        self._submitted = SubmittedWrite()

    def write(self, checkpoint: Any, content: Content) -> None:
        """Write a checkpoint file, and return when the file is complete."""
        state, write = content
        with files.state_is_kept():
            self._writer.write(checkpoint, state, write)
        self.note_file(files.shown(checkpoint))

    def submit(
        self, checkpoint: Any, newest: NewestSnapshot, content: Callable[[Snapshot], Content], owner: Any
    ) -> None:
        """Write a checkpoint file in a background thread.

        Args:
            checkpoint: Path or URI of the file.
            newest: Handle to the snapshot of the training state to save. The snapshot may still be in the workers.
            content: Function that creates the file's content from the snapshot. If the snapshot is already in the
                driver, `content` is called immediately, so that its errors are raised here.
            owner: The trainer, which is kept alive while the snapshot is still in its workers.
        """
        known = None if newest.landed is None else content(newest.landed)
        kept_alive = newest if known is not None else (newest, owner)

        def make() -> Content:
            return content(newest.result()) if known is None else known

        with files.state_is_kept():
            self._submitted = self._writer.submit(checkpoint, make, partial(self._write, kept_alive))
        self._newest = ref(newest)

    def submitted_by(self, save: Callable[[], Any]) -> SubmittedWrite:
        """Run a function that saves the trainer, and return the write that it submitted to the writer."""
        self._submitted = SubmittedWrite()  # complete already, if the function submits none
        save()
        return self._submitted

    def await_states(self) -> None:
        """Wait until the driver has received all training states that the writer has yet to write.

        Wait for at most 60 s. Call this method before stopping the workers.
        """
        newest = self._newest()
        if newest is not None:
            with suppress(TimeoutError, WorkersLostError):  # the writer reports these errors
                newest.result(_END_S)

    def note_file(self, shown: str) -> None:
        """Remember the name of the checkpoint file that was last written or loaded."""
        self._snapshots.last_file = shown

    def _write(self, kept_alive: Any, path: str, content: Content) -> None:
        state, write = content
        write(path, state)  # `state` refers to the snapshot's memory, which `kept_alive` protects from being freed
        self.note_file(files.shown(path))


def load_into_all(
    controller: ElasticController,
    restore: Callable[..., Any],
    state: Any,
    rank_states: tuple[Any, ...],
    is_complete: bool,
) -> None:
    """Load a training state into all workers.

    Args:
        controller: Controller of the workers.
        restore: Method that restores the state in each worker.
        state: The state that is the same for all ranks, or a `SharedValue` with a copy of it in Ray's object store.
        rank_states: For each rank, its own state, such as the state of its random number generators.
        is_complete: Whether `state` and `rank_states` are the whole training state. If so, they also become the last
            snapshot, from which workers restart after a failure.
    """

    def arguments(worlds: Sequence[World]) -> list[tuple[Any, Any]]:
        return list(zip(controller.ensure_group().share(state), own_states(rank_states, len(worlds)), strict=True))

    is_repeatable = isinstance(state, SharedValue)
    call = Call(restore, arguments, changes_state=not is_complete, keeps_alike=True, is_repeatable=is_repeatable)
    with controller.turns.take_turn():  # no other thread may call workers between loading and `adopt`
        controller.run(call)
        if is_complete:
            value, reference = (state.value, state.reference) if isinstance(state, SharedValue) else (state, None)
            controller.snapshots.adopt(Snapshot(value, rank_states, reference=reference))


def load_snapshot_into_all(controller: ElasticController, restore: Callable[..., Any], snapshot: Snapshot) -> None:
    """Load a snapshot of this or another trainer into all workers. The snapshot itself is not modified.

    Args:
        controller: Controller of the workers.
        restore: Method that restores the snapshot in each worker.
        snapshot: The snapshot, a copy of a training state. If Ray's object store already has a copy, and all workers
            run on one node, that copy is used.
    """
    group = controller.ensure_group()
    is_stored = snapshot.reference is not None and group.is_on_one_node
    shared = snapshot.shared_state
    stored = SharedValue(shared, snapshot.reference) if is_stored else group.store(shared)
    is_complete = len(snapshot.rank_states) == controller.num_workers
    load_into_all(controller, restore, stored, snapshot.rank_states, is_complete)
