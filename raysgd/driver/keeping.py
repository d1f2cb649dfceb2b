"""The state that a trainer keeps: in files, in all its workers, and in the journal of a detached one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from raysgd.driver.fit_loop import FitProgress
from raysgd.engine.controller import ElasticController
from raysgd.engine.keeper import Keeper
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import World
from raysgd.engine.snapshots import NewestSnapshot, Snapshot, own_states
from raysgd.engine.transfers import SharedValue
from raysgd.exceptions import WorkersLostError
from raysgd.history.accounts import Accounts
from raysgd.history.history import BEGINNING
from raysgd.storage import files
from raysgd.storage.background_writer import BackgroundWriter, Write

_END_S = 60.0

State = dict[str, Any]
Content = tuple[State, Write]
"""What a file is to hold, and what writes it."""
_RECORDS = "records:"


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
        """Write a file."""
        state, write = content
        with files.state_is_kept():
            self._writer.write(checkpoint, state, write)
        self.note_file(files.shown(checkpoint))

    def submit(
        self, checkpoint: Any, newest: NewestSnapshot, content: Callable[[Snapshot], Content], owner: Any
    ) -> None:
        """Have a file written in the background.

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
        """Wait until everything that is to be written is in the driver, before workers are ended."""
        newest = self._newest()
        if newest is not None:
            with suppress(TimeoutError, WorkersLostError):  # the writer tells it
                newest.result(_END_S)

    def note_file(self, shown: str) -> None:
        """Note a file that holds the state of the trainer, whole or in part."""
        self._snapshots.last_file = shown

    def _write(self, kept_alive: Any, path: str, content: Content) -> None:
        state, write = content
        write(path, state)  # the state is a view of the snapshot, which is kept alive
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
        restore: The method of a replica that takes it over.
        state: What concerns all ranks; it may lie in the store already.
        rank_states: What each rank had for itself.
        is_complete: Whether that is all there is: then a recovery starts from it, and no snapshot is fetched.
    """

    def arguments(worlds: Sequence[World]) -> list[tuple[Any, Any]]:
        return list(zip(controller.ensure_group().share(state), own_states(rank_states, len(worlds)), strict=True))

    is_repeatable = isinstance(state, SharedValue)
    call = Call(restore, arguments, changes_state=not is_complete, keeps_alike=True, is_repeatable=is_repeatable)
    with controller.turns.take_turn():  # a call of another thread in between would count as covered
        controller.run(call)
        if is_complete:
            value, reference = (state.value, state.reference) if isinstance(state, SharedValue) else (state, None)
            controller.snapshots.adopt(Snapshot(value, rank_states, reference=reference))


def load_snapshot_into_all(controller: ElasticController, restore: Callable[..., Any], snapshot: Snapshot) -> None:
    """Load what the workers of this or another trainer had. It may be shared: nothing of it is changed.

    Args:
        controller: Runs the call.
        restore: The method of a replica that takes it over.
        snapshot: The state. What lies in the store of a single node already is not stored again.
    """
    group = controller.ensure_group()
    is_stored = snapshot.reference is not None and group.is_on_one_node
    shared = snapshot.shared_state
    stored = SharedValue(shared, snapshot.reference) if is_stored else group.store(shared)
    is_complete = len(snapshot.rank_states) == controller.num_workers
    load_into_all(controller, restore, stored, snapshot.rank_states, is_complete)


class KeptTrainer:
    """Tells what of a trainer has changed, and gives it back to the trainer of another process.

    Args:
        trainer: A class-based trainer.
        keeper: Knows how many calls its workers were asked.
    """

    def __init__(self, trainer: Any, keeper: Keeper) -> None:
        self._trainer, self._keeper = trainer, keeper
        self._seen, self._settings = BEGINNING, trainer._settings

    def changes(self) -> dict[str, bytes]:
        """Return the entries that are to be kept now."""
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
        """Let the trainer know what was kept."""
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
        """End what is left of the call that the process before was in: the next one is another one.

        Workers that are still in it, since it was not taken up, finish it, but for those of one that Ctrl-C ended.
        """
        self._trainer._fit_progress = None
        found, self._keeper.found = self._keeper.found, None
        if found is not None and found.call > self._keeper.num_calls:
            self._keeper.num_calls = found.call
            if is_interrupted:
                self._trainer._controller.end_left_call()


def _told_since(accounts: Accounts, before: Mapping[int, float]) -> float:
    """Return how long the rank with most of it was in training calls since then."""
    return max((seconds - before.get(rank, 0.0) for rank, seconds in accounts.in_calls().items()), default=0.0)
