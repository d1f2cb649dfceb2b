"""Saves a trainer to files, loads states into all workers, and records the changes of a detached trainer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.keeper import Keeper
from raysgd.core.engine.shared.call import Call
from raysgd.core.engine.shared.types import World
from raysgd.core.engine.snapshots import NewestSnapshot, Snapshot, own_states
from raysgd.core.engine.transfers import SharedValue
from raysgd.core.history.accounts import Accounts
from raysgd.core.history.history import BEGINNING
from raysgd.exceptions import WorkersLostError
from raysgd.storage import files
from raysgd.storage.background_writer import BackgroundWriter, SubmittedWrite, Write
from raysgd.trainer.driver.fit_loop import FitProgress

_END_S = 60.0

State = dict[str, Any]
Content = tuple[State, Write]
"""The state to save, and the function that writes it."""
_RECORDS = "records:"


class FileSaves:
    """Writes the files of a trainer.

    Args:
        controller: The workers' controller. Its snapshots record the name of the file that was written last.
        writer: Writes files in a background thread.

    Attributes:
        submitted: The most recent background write, or None before the first.
    """

    def __init__(self, controller: ElasticController, writer: BackgroundWriter) -> None:
        self._snapshots, self._writer = controller.snapshots, writer
        self._newest: Callable[[], NewestSnapshot | None] = lambda: None
        self.submitted: SubmittedWrite | None = None

    def write(self, checkpoint: Any, content: Content) -> None:
        """Write a file, and return when it is complete."""
        state, write = content
        with files.state_is_kept():
            self._writer.write(checkpoint, state, write)
        self.note_file(files.shown(checkpoint))

    def submit(
        self, checkpoint: Any, newest: NewestSnapshot, content: Callable[[Snapshot], Content], owner: Any
    ) -> None:
        """Write a file in the background.

        Args:
            checkpoint: Path of the file.
            newest: The state to save.
            content: Creates the file's content from the state. If the state is already in the driver, `content` is
                called immediately, so that its errors are raised here.
            owner: The trainer. A reference keeps it alive while the state is still in its workers.
        """
        known = None if newest.landed is None else content(newest.landed)
        kept_alive = newest if known is not None else (newest, owner)

        def make() -> Content:
            return content(newest.result()) if known is None else known

        with files.state_is_kept():
            self.submitted = self._writer.submit(checkpoint, make, partial(self._write, kept_alive))
        self._newest = ref(newest)

    def await_states(self) -> None:
        """Wait until the driver has received all states that are yet to be written.

        Call this before stopping the workers.
        """
        newest = self._newest()
        if newest is not None:
            with suppress(TimeoutError, WorkersLostError):  # the background writer reports the error
                newest.result(_END_S)

    def note_file(self, shown: str) -> None:
        """Record the name of the file to which the trainer's state, or a part of the state, was last written."""
        self._snapshots.last_file = shown

    def _write(self, kept_alive: Any, path: str, content: Content) -> None:
        state, write = content
        write(path, state)  # `state` is a view of the snapshot, which `kept_alive` keeps in memory
        self.note_file(files.shown(path))


def load_into_all(
    controller: ElasticController,
    restore: Callable[..., Any],
    state: Any,
    rank_states: tuple[Any, ...],
    is_complete: bool,
) -> None:
    """Load a state into all workers.

    Args:
        controller: Runs the call.
        restore: Replica method that restores the state.
        state: The state that all ranks share, or a `SharedValue` with a copy in Ray's object store.
        rank_states: Each rank's own state.
        is_complete: Whether the state and the rank states are the whole training state. A recovery then starts from
            this state, without fetching a snapshot.
    """

    def arguments(worlds: Sequence[World]) -> list[tuple[Any, Any]]:
        return list(zip(controller.ensure_group().share(state), own_states(rank_states, len(worlds)), strict=True))

    is_repeatable = isinstance(state, SharedValue)
    call = Call(restore, arguments, changes_state=not is_complete, keeps_alike=True, is_repeatable=is_repeatable)
    with controller.turns.take_turn():  # another thread's call must not come between load and `adopt`
        controller.run(call)
        if is_complete:
            value, reference = (state.value, state.reference) if isinstance(state, SharedValue) else (state, None)
            controller.snapshots.adopt(Snapshot(value, rank_states, reference=reference))


def load_snapshot_into_all(controller: ElasticController, restore: Callable[..., Any], snapshot: Snapshot) -> None:
    """Load a snapshot of this or another trainer into all workers. The snapshot may be shared, so it is not modified.

    Args:
        controller: Runs the call.
        restore: Replica method that restores the state.
        snapshot: The state. On a single node, a copy that is already in Ray's object store is reused.
    """
    group = controller.ensure_group()
    is_stored = snapshot.reference is not None and group.is_on_one_node
    shared = snapshot.shared_state
    stored = SharedValue(shared, snapshot.reference) if is_stored else group.store(shared)
    is_complete = len(snapshot.rank_states) == controller.num_workers
    load_into_all(controller, restore, stored, snapshot.rank_states, is_complete)


class KeptTrainer:
    """Records a detached trainer's changes, and restores them in the next process that attaches to it.

    Args:
        trainer: A class-based trainer.
        keeper: Counts the trainer's calls to its workers.
    """

    def __init__(self, trainer: Any, keeper: Keeper) -> None:
        self._trainer, self._keeper = trainer, keeper
        self._seen, self._settings = BEGINNING, trainer._settings

    def changes(self) -> dict[str, bytes]:
        """Return the entries to store, pickled: the current state, and new records and settings since the last call."""
        from ray import cloudpickle

        trainer, history, snapshots = self._trainer, self._trainer.history, self._trainer._controller.snapshots
        places = trainer._calls.sharing.places_to_keep()
        accounts = trainer._calls.accounts.kept()
        state = self._keeper.num_calls, list(history.events), snapshots.last_file, places, accounts
        found: dict[str, Any] = {"state": state}
        if history.extent.records > self._seen.records:
            found[f"{_RECORDS}{self._seen.records}"] = history.part(self._seen, history.extent).records
            self._seen = history.extent
        if trainer._settings is not self._settings:
            self._settings = trainer._settings
            found["settings"] = self._settings
        return {name: cloudpickle.dumps(value) for name, value in found.items()}

    def take_over(self, kept: Mapping[str, bytes]) -> None:
        """Restore a previous process's stored entries, such as history and settings, in the trainer."""
        trainer = self._trainer
        self._keeper.num_calls, events, last_file, places, accounts = pickle.loads(kept["state"])
        trainer._calls.accounts.take_over(accounts)
        trainer._recorder.told_s = partial(_told_since, trainer._calls.accounts, trainer._calls.accounts.in_calls())
        trainer._controller.snapshots.last_file = last_file
        trainer.history.events[:] = events
        for name in [name for name in kept if name.startswith(_RECORDS)]:
            for record in pickle.loads(kept[name]):
                trainer._recorder.add_record(record)
        self._seen = trainer.history.extent
        if "settings" in kept:
            self._settings = pickle.loads(kept["settings"])
            trainer._take_settings(self._settings)
            trainer._calls.sharing = trainer._new_sharing()
        trainer._calls.sharing.take_over(places)
        if "fit" in kept:
            progress: FitProgress = pickle.loads(kept["fit"])
            trainer._fit_progress = progress

    def leave_call(self, *, is_interrupted: bool) -> None:
        """Abandon the call that the previous process left running, so that the next call does not continue it.

        Workers that are still running the abandoned call finish it, unless Ctrl-C ended it.
        """
        self._trainer._fit_progress = None
        found, self._keeper.found = self._keeper.found, None
        if found is not None and found.call > self._keeper.num_calls:
            self._keeper.num_calls = found.call
            if is_interrupted:
                self._trainer._controller.end_left_call()


def _told_since(accounts: Accounts, before: Mapping[int, float]) -> float:
    """Return how many seconds ranks spent in training calls since the totals `before`: the maximum over ranks."""
    return max((seconds - before.get(rank, 0.0) for rank, seconds in accounts.in_calls().items()), default=0.0)
