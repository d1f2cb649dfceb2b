"""The small file beside a checkpoint of `Run.save`: the history of the run and the states of its callbacks."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd.replicas.history import History, plain
from raysgd.storage import files

logger = logging.getLogger(__name__)

ENDING = ".run.json"
_FORMAT = 1


@dataclass(frozen=True)
class Sidecar:
    """What stands beside a checkpoint.

    Attributes:
        epoch: How many epochs the checkpoint has.
        history: Of the run, up to the checkpoint.
        callbacks: For each callback its class and its state.
    """

    epoch: int
    history: History
    callbacks: list[dict[str, Any]] = field(default_factory=list)

    def write(self, checkpoint: str) -> None:
        """Writes it beside a checkpoint.

        Raises:
            OSError: It could not be written.
        """
        content = {
            "raysgd_run": _FORMAT,
            "epoch": self.epoch,
            "history": json.loads(self.history.to_json()),
            "callbacks": plain(self.callbacks),
        }
        with files.saving(location(checkpoint)) as file:
            file.write(json.dumps(content, allow_nan=False).encode())

    @classmethod
    def read(cls, checkpoint: str) -> Sidecar | None:
        """What stands beside a checkpoint; None if there is nothing.

        Raises:
            ValueError: It is damaged.
            StorageError: A store could not be reached.
        """
        beside = location(checkpoint)
        try:
            with files.local_copy(beside) as path:
                content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"`{files.shown(beside)}` is damaged: {error}. Delete it to resume without it.") from error
        history = History.from_json(json.dumps(content["history"]))
        return cls(int(content["epoch"]), history, list(content["callbacks"]))


def location(checkpoint: str) -> str:
    """Where the file beside a checkpoint is."""
    return files.beside(checkpoint, ENDING)
