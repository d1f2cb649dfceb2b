"""Reads and writes sidecar files. `Run.save` writes one beside each checkpoint, with the history and callback states.

In a long run, the history is large, and most of it was already saved with earlier checkpoints. Therefore, the history
is split into parts, and each part is written only once, to a separate file in the folder of the checkpoints. The
sidecar file lists these parts, and holds only the rest of the history.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd.core.arguments import is_saved_count
from raysgd.core.files import inside
from raysgd.core.history.history import BEGINNING, History, HistoryLimits, plain
from raysgd.storage import files

ENDING = ".run.json"
_FORMAT = 1
_ROWS_OF_PART = 200
_NAME_OF_PART = re.compile(r"history-[0-9a-f]{16}\.json")
_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "epoch": is_saved_count,
    "callbacks": lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value),
    **dict.fromkeys(("pending", "epochs", "max_step"), lambda value: value is None or is_saved_count(value)),
    "begun": lambda value: value is None or (isinstance(value, dict) and is_saved_count(value.get("num_steps"))),
    "open_steps": lambda value: value is None or isinstance(value, list),
}
"""For each attribute of `Sidecar` except the history, a function that returns True if the value is valid."""


@dataclass(frozen=True)
class Sidecar:
    """The content of a sidecar file, which is written beside a checkpoint.

    Attributes:
        epoch: Number of completed epochs in the checkpoint.
        history: History of the run up to the checkpoint.
        callbacks: The class name and the state of each callback.
        pending: Number of an epoch whose result the callbacks had not received yet, for example because validation was
            still running. None if they had received all results.
        epochs: Number of the epoch with which the run ends, or None if unknown.
        begun: If the checkpoint was saved inside an epoch, the progress of this epoch, as plain data. Otherwise, None.
        open_steps: Metrics of steps that loggers have not received yet, as plain data: the step of the
            checkpoint, followed by each rank's metrics of these steps.
        max_step: The step with which the run ends, or None if the number of steps is not limited.
    """

    epoch: int
    history: History
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    pending: int | None = None
    epochs: int | None = None
    begun: dict[str, Any] | None = None
    open_steps: list[Any] | None = None
    max_step: int | None = None


@dataclass
class Sidecars:
    """Writes and reads the sidecar files of one run."""

    # For each folder of checkpoints: the files with parts of the history, in order, and how much of the history these
    # files hold.
    _written: dict[str, tuple[tuple[str, ...], HistoryLimits]] = field(default_factory=dict)

    def write(self, checkpoint: str, sidecar: Sidecar) -> None:
        """Write the sidecar file of a checkpoint.

        Raises:
            OSError: The file could not be written.
        """
        history = sidecar.history
        parts, extent = self._with_parts(checkpoint, history)
        rest = history.part(extent, history.extent)
        rest.stop_reason = history.stop_reason
        content = {
            "raysgd_run": _FORMAT,
            **{name: getattr(sidecar, name) for name in _ENTRIES},
            "history": rest.as_data(),
            "parts": list(parts),
            "callbacks": plain(sidecar.callbacks),
        }
        _write(location(checkpoint), json.dumps(content, allow_nan=False))

    def _with_parts(self, checkpoint: str, history: History) -> tuple[tuple[str, ...], HistoryLimits]:
        """If the history has enough new rows, write them to a separate file, as a new part of the history.

        The last entry of each list in the history may still change, so it is not written.

        Returns:
            The names of the files with all parts so far, and how much of the history they hold.
        """
        folder = files.in_folder_of(checkpoint, "")
        names, extent = self._written.get(folder, ((), BEGINNING))
        end = HistoryLimits(*(max(0, number - 1) for number in history.extent))
        if end.rows - extent.rows < _ROWS_OF_PART:
            return names, extent
        content = history.part(extent, end).to_json()
        name = f"history-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"  # other runs' files get other names
        _write(files.in_folder_of(checkpoint, name), content)
        self._written[folder] = (*names, name), end
        return self._written[folder]

    def read(self, checkpoint: str) -> Sidecar | None:
        """Return the content of a checkpoint's sidecar file, or None if the checkpoint has no sidecar.

        Later calls to `write` in the same folder reuse the parts of the history that this sidecar lists.

        Raises:
            ValueError: The sidecar file is damaged, or a file with a part of the history is missing or damaged.
            StorageError: The storage is unreachable.
        """
        saved = _read(checkpoint)
        if saved is None:
            return None
        sidecar, names = saved
        parts, history = [_part(checkpoint, name) for name in names], sidecar.history
        rest = history.extent
        for part in reversed(parts):
            history.take_over(part)
        extent = HistoryLimits(*(whole - late for whole, late in zip(history.extent, rest, strict=True)))
        self._written[files.in_folder_of(checkpoint, "")] = tuple(names), extent
        return sidecar


def place_of(checkpoint: str) -> tuple[int, int]:
    """Return how far the training was when a checkpoint was saved: completed epochs, and batches of the next epoch.

    Return (-1, 0) if the checkpoint has no sidecar file.

    Raises:
        ValueError: The sidecar file is damaged.
    """
    saved = _read(checkpoint)
    if saved is None:
        return -1, 0
    return saved[0].epoch, 0 if saved[0].begun is None else int(saved[0].begun["num_steps"])


def location(checkpoint: str) -> str:
    """Return the path or URI of the sidecar file of a checkpoint."""
    return files.beside(checkpoint, ENDING)


def _write(place: str, content: str) -> None:
    with files.saving(place) as file:
        file.write(content.encode())


def _read(checkpoint: str) -> tuple[Sidecar, list[str]] | None:
    """Return the content of the sidecar file of a checkpoint, and the names of the files with parts of the history.

    Return None if the checkpoint has no sidecar file.
    """
    beside = location(checkpoint)
    try:
        content = json.loads(_text(beside))
        history = History.from_json(json.dumps(content["history"]))
        for name, is_right in [*_ENTRIES.items(), ("parts", _is_list_of_parts)]:
            if not is_right(content.get(name)):
                raise ValueError(f"`{name}` is {str(content.get(name))[:100]!r}")
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`{files.shown(beside)}` is damaged: {error}. Delete it to resume without it.") from error
    return Sidecar(history=history, **{name: content.get(name) for name in _ENTRIES}), content["parts"]


def _is_list_of_parts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and _NAME_OF_PART.fullmatch(each) for each in value)


def _part(checkpoint: str, name: str) -> History:
    place = files.in_folder_of(checkpoint, name)
    try:
        return History.from_json(_text(place))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"`{files.shown(place)}`, a part of the history, is missing or damaged: {error}. Bring it back, or delete "
            f"`{files.shown(location(checkpoint))}` to resume without the history and the states of the callbacks."
        ) from error


def _text(place: str) -> str:
    with files.local_copy(place) as copy:
        path = Path(copy)
        return inside(path.parent, path.name).read_text(encoding="utf-8")
