"""The files that a class-based trainer writes: at once, or in the background as soon as the state is in the driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from raysgd.engine.controller import ElasticController
from raysgd.engine.processes.snapshots import NewestSnapshot, Snapshot
from raysgd.storage import files
from raysgd.storage.background_writer import BackgroundWriter, Write

_END_S = 60.0

State = dict[str, Any]
Content = tuple[State, Write]
"""What a file is to hold, and what writes it."""


class FileSaves:
    """Writes the files of a trainer.

    Args:
        controller: Keeps the workers alive; told which file was written last.
        writer: Writes files in its thread.
    """

    def __init__(self, controller: ElasticController, writer: BackgroundWriter) -> None:
        self._snapshots, self._writer = controller.snapshots, writer
        self._newest: Callable[[], NewestSnapshot | None] = lambda: None

    def write(self, checkpoint: Any, content: Content) -> None:
        """Writes a file."""
        state, write = content
        with files.state_is_kept():
            self._writer.write(checkpoint, state, write)
        self.note_file(files.shown(checkpoint))

    def submit(
        self, checkpoint: Any, newest: NewestSnapshot, content: Callable[[Snapshot], Content], owner: Any
    ) -> None:
        """Has a file written in the background.

        Args:
            checkpoint: Where to.
            newest: The state.
            content: Makes of it what the file is to hold. Called at once if the state is in the driver, so that what
                it raises is not put off.
            owner: The trainer. It lives as long as its workers are needed for that.
        """
        if newest.landed is not None:
            known = content(newest.landed)
            kept_alive: Any = newest
            job = _SaveJob(lambda: known)
        else:
            kept_alive = (newest, owner)
            job = _SaveJob(lambda: content(newest.result()))
        with files.state_is_kept():
            self._writer.submit(checkpoint, job.state, partial(self._write, job, kept_alive))
        self._newest = ref(newest)

    def await_states(self) -> None:
        """Waits until everything that is to be written is in the driver, before workers are ended."""
        newest = self._newest()
        if newest is not None:
            with suppress(Exception):  # the writer tells it
                newest.result(_END_S)

    def note_file(self, shown: str) -> None:
        """Notes a file that holds the state of the trainer, whole or in part."""
        self._snapshots.last_file = shown

    def _write(self, job: _SaveJob, kept_alive: Any, path: str, state: State) -> None:
        job.write(path, state)  # the state is a view of the snapshot, which is kept alive
        self.note_file(files.shown(path))


class _SaveJob:
    """One file to be written in the background."""

    def __init__(self, make: Callable[[], Content]) -> None:
        self._make = make
        self.write: Write

    def state(self) -> State:
        """Return what the file is to hold; from now on there is something that writes it."""
        state, self.write = self._make()
        return state
