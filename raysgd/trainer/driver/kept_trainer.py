"""`KeptTrainer`: what a detached trainer stores when it ends, and for a process that continues it.

A detached trainer outlives the program that created it. It is saved when no program needs it any more. If its own
process dies, a new process takes over the workers and the records of the trainer.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from raysgd.callbacks.sidecar import Sidecar, Sidecars
from raysgd.core.cluster.keeper import Keeper
from raysgd.core.history.accounts import Accounts
from raysgd.core.history.history import BEGINNING
from raysgd.trainer.driver.life import FitProgress, TrainerLife

_RECORDS = "records:"


class KeptTrainer:
    """Saves a detached trainer, and records its settings, history and progress, and restores them in a later process.

    Args:
        life: The trainer's workers and settings.
        keeper: Counts the trainer's calls that change the training state.
        save: The trainer's method `save`.
    """

    def __init__(self, life: TrainerLife, keeper: Keeper, save: Callable[[str], Any]) -> None:
        self._life, self._keeper, self._save = life, keeper, save
        self._seen, self._settings = BEGINNING, life.settings

    def save_left(self, reason: str) -> str | None:
        """Save the trainer, which is about to end, so that a later `fit(resume_from="auto")` finds the file.

        Return the path of the file. Do nothing and return None if the user's settings name no folder for it.

        Args:
            reason: Why the trainer ends. It becomes the `stop_reason` of the history.
        """
        file, history = self._life.left_file, self._life.recorder.history
        if file is not None:
            self._save(file)
            history.stop_reason = reason
            Sidecars().write(file, Sidecar(self._life.of_first("epochs_done"), history))
        return file

    def changes(self) -> dict[str, bytes]:
        """Return the pickled entries to store for a later process, by name.

        These are the trainer's current progress, and the records and settings that are new since this method was last
        called.
        """
        from ray import cloudpickle

        life, history = self._life, self._life.recorder.history
        positions, accounts = life.sharing.positions_to_keep(), life.figures.accounts.kept()
        last_file = life.controller.snapshots.last_file
        entries: dict[str, Any] = {
            "state": (self._keeper.num_calls, list(history.events), last_file, positions, accounts)
        }
        if history.extent.records > self._seen.records:
            entries[f"{_RECORDS}{self._seen.records}"] = history.part(self._seen, history.extent).records
            self._seen = history.extent
        if life.settings is not self._settings:
            self._settings = life.settings
            entries["settings"] = self._settings
        return {name: cloudpickle.dumps(value) for name, value in entries.items()}

    def take_over(self, kept: Mapping[str, bytes]) -> None:
        """Restore the history, the settings and the progress that a previous process stored.

        Args:
            kept: The stored entries by name: those that `changes` returned and, under the name `fit`, the progress of a
                `fit` that was running.
        """
        life, recorder, accounts = self._life, self._life.recorder, self._life.figures.accounts
        self._keeper.num_calls, events, last_file, positions, kept_accounts = pickle.loads(kept["state"])
        accounts.take_over(kept_accounts)
        recorder.told_s = partial(_told_since, accounts, accounts.in_calls())
        life.controller.snapshots.last_file = last_file
        recorder.history.events[:] = events
        for name in [name for name in kept if name.startswith(_RECORDS)]:
            for record in pickle.loads(kept[name]):
                recorder.add_record(record)
        self._seen = recorder.history.extent
        if "settings" in kept:
            self._settings = pickle.loads(kept["settings"])
            life.take_settings(self._settings)
            life.sharing = life.new_sharing()
        life.sharing.take_over(positions)
        if "fit" in kept:
            progress: FitProgress = pickle.loads(kept["fit"])
            life.fit_progress = progress

    def leave_call(self, *, is_interrupted: bool) -> None:
        """Abandon the call that the previous process left running, so that the next call does not continue that call.

        Args:
            is_interrupted: Whether to end the abandoned call in the workers, because the user pressed Ctrl-C. If False,
                workers that are still running the call finish it.
        """
        self._life.fit_progress = None
        running, self._keeper.found = self._keeper.found, None
        if running is not None and running.call > self._keeper.num_calls:
            self._keeper.num_calls = running.call
            if is_interrupted:
                self._life.controller.end_left_call()


def _told_since(accounts: Accounts, before: Mapping[int, float]) -> float:
    """Return how many seconds of training calls have passed since an earlier moment: the maximum over ranks.

    Args:
        accounts: Records of how the workers spend their time.
        before: For each rank, its total seconds in training calls at the earlier moment.
    """
    return max((seconds - before.get(rank, 0.0) for rank, seconds in accounts.in_calls().items()), default=0.0)
