"""The driver's part of a trainer in a host, as entries of a journal."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from raysgd.driver.fit_loop import FitProgress
from raysgd.engine.keeper import Keeper
from raysgd.history.history import BEGINNING

_RECORDS = "records:"


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

        trainer, history = self._trainer, self._trainer.history
        found: dict[str, Any] = {"state": (self._keeper.num_calls, list(history.events))}
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
        self._keeper.num_calls, events = pickle.loads(kept["state"])
        trainer.history.events[:] = events
        for name in [name for name in kept if name.startswith(_RECORDS)]:
            for record in pickle.loads(kept[name]):
                trainer._recorder.add(record)
        self._seen = trainer.history.extent
        if "settings" in kept:
            self._settings = pickle.loads(kept["settings"])
            trainer._take_settings(self._settings)
            trainer._calls.sharing = trainer._new_sharing()
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
                self._trainer._controller.kill_group()
