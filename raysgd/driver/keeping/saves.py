"""The files that a class-based trainer writes: at once, or in the background as soon as the state is in the driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from raysgd.engine.controller import ElasticController
from raysgd.engine.snapshots import NewestSnapshot, Snapshot
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
        known = None if newest.landed is None else content(newest.landed)
        kept_alive = newest if known is not None else (newest, owner)

        def make() -> Content:
            return content(newest.result()) if known is None else known

        with files.state_is_kept():
            self._writer.submit(checkpoint, make, partial(self._write, kept_alive))
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

    def _write(self, kept_alive: Any, path: str, content: Content) -> None:
        state, write = content
        write(path, state)  # the state is a view of the snapshot, which is kept alive
        self.note_file(files.shown(path))
