"""Checkpoints in the driver: who takes them, how they are written, and which one a run goes on from.

Which of them stay is decided in `_retention`; how they travel from a worker is in `_arrivals`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raysgd._ranking import MAX, MIN
from raysgd.air._packing import DICT_FILE
from raysgd.storage import Folder, StorageError, open_folder
from raysgd.storage.files import is_uri, local_copy, saving
from raysgd.train._arrivals import Arrivals, CheckpointLostError
from raysgd.train._retention import CheckpointStrategy, Retention, Verdict, check_strategy
from raysgd.train.constants import TRAIN_CHECKPOINT_SUBDIR

__all__ = [
    "MAX",
    "MIN",
    "CheckpointLostError",
    "CheckpointManager",
    "CheckpointStrategy",
    "FileStore",
    "Retention",
    "Verdict",
    "check_strategy",
    "load_checkpoint",
    "write_checkpoint",
]

logger = logging.getLogger(__name__)


class FileStore:
    """The folder in which the checkpoints of a run are, one file each.

    Attributes:
        folder: The folder, on a disk or in a store; None to write nothing.
    """

    def __init__(self, folder: Path | Folder | None = None) -> None:
        self.folder = folder
        self._latest: int | None = None

    def path(self, identity: int) -> Path | str | None:
        """The file of a checkpoint, as a path or a URI; None where nothing is written."""
        if isinstance(self.folder, Folder):
            return (self.folder / _file_name(identity)).uri
        return self.folder / _file_name(identity) if self.folder is not None else None

    @property
    def latest(self) -> Path | str | None:
        """The file that was written last, if it is still there."""
        return self.path(self._latest) if self._latest is not None and self._has(self._latest) else None

    def write(self, identity: int, checkpoint: Mapping[str, Any]) -> None:
        """Writes a checkpoint, whole or not at all."""
        path = self.path(identity)
        if path is not None:
            write_checkpoint(checkpoint, path)
            self._latest = identity

    def delete(self, identity: int) -> None:
        """Deletes the file of a checkpoint, if there is one."""
        if isinstance(self.folder, Folder):
            self.folder.remove(_file_name(identity))
        elif self.folder is not None:
            (self.folder / _file_name(identity)).unlink(missing_ok=True)

    def _has(self, identity: int) -> bool:
        if isinstance(self.folder, Folder):
            return self.folder.has(_file_name(identity))
        return self.folder is not None and (self.folder / _file_name(identity)).exists()


def _file_name(identity: int) -> str:
    return f"checkpoint_{identity:06d}"


class CheckpointManager:
    """Takes the checkpoints of one run after the other. One is on its way at a time; the function does not wait for it.

    Attributes:
        latest_checkpoint_id: Number of the newest checkpoint of the run, from 1.
        next_index: None: no worker stores a checkpoint itself.
        num_landed: How many checkpoints of all runs have arrived.
    """

    next_index: int | None = None

    def __init__(self) -> None:
        self.latest_checkpoint_id = 0
        self._latest: dict[str, Any] | None = None
        self._latest_of_run: dict[str, Any] | None = None
        self._begun_from: dict[str, Any] | None = None
        self._strategy = CheckpointStrategy()
        self._retention = Retention(self._strategy)
        self._store = FileStore()
        self._arrivals = Arrivals()
        self.num_landed = 0

    def begin_run(
        self,
        run_dir: Path | Folder | None,
        checkpoint: dict[str, Any] | None = None,
        strategy: CheckpointStrategy | None = None,
        latest_id: int | None = None,
    ) -> None:
        """Gets ready for a run.

        Args:
            run_dir: Where its checkpoints go, in a folder of their own; None to write none.
            checkpoint: What the run starts from.
            strategy: What is kept; None for all.
            latest_id: The number that those of this run follow.
        """
        try:
            self.flush()
        except Exception as error:  # of a run that has ended, with another error or before its end
            logger.error("could not keep the last checkpoint of the previous run: %r", error)
        self._begun_from = checkpoint
        self._latest_of_run = None
        self._strategy = strategy or CheckpointStrategy()
        self._retention = Retention(self._strategy)
        self._store = FileStore(run_dir / TRAIN_CHECKPOINT_SUBDIR if run_dir is not None else None)
        self.latest_checkpoint_id = latest_id or 0

    def begin_attempt(self) -> None:
        """Nothing: what the last attempt saved stays."""

    @property
    def score_attribute(self) -> str:
        """The key of a checkpoint by which it is judged."""
        return self._strategy.checkpoint_score_attribute

    def add(self, score: Any, receive: Callable[[], dict[str, Any]] | None) -> None:
        """Takes a checkpoint over. Returns at once; `receive` gets it, from a thread.

        Args:
            score: The value by which it is judged.
            receive: Gets it; raises `CheckpointLostError` when it was lost.

        Raises:
            ValueError: `score` cannot be compared.
            Exception: What went wrong with an earlier one, an `OSError` when it could not be written.
        """
        assert receive is not None, "no worker stores a checkpoint itself"
        self._retention.check(score)
        self.flush()
        self.latest_checkpoint_id = identity = self.latest_checkpoint_id + 1
        self._arrivals.begin(identity, receive, lambda checkpoint: self._keep(identity, score, checkpoint))

    def _keep(self, identity: int, score: Any, checkpoint: dict[str, Any]) -> None:
        self._latest = self._latest_of_run = checkpoint
        self.num_landed += 1
        verdict = self._retention.admit(identity, score)
        if not verdict.is_kept:
            return
        self._store.write(identity, checkpoint)
        if verdict.dropped is not None:
            self._store.delete(verdict.dropped)

    def await_arrival(self, timeout_s: float) -> None:
        """Waits until nothing is on its way from a worker any more, whatever became of it; not until it is written."""
        self._arrivals.await_arrival(timeout_s)

    def settle(self, timeout_s: float) -> None:
        """Waits until what arrives in time is written; errors stay for `flush`."""
        self._arrivals.settle(timeout_s)

    def flush(self) -> None:
        """Waits until what is on its way has arrived and is written.

        Raises:
            Exception: What went wrong with it, an `OSError` when it could not be written.
        """
        self._arrivals.flush()

    # ---------------------------------------------------------------------------------------------- what there is

    @property
    def restart_point(self) -> dict[str, Any] | None:
        """What a function that is started again goes on from: the newest of this run, or what it began from."""
        self.flush()
        return self._latest_of_run if self._latest_of_run is not None else self._begun_from

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of any run."""
        self.flush()
        return self._latest

    @property
    def latest_checkpoint_dir(self) -> Path | Folder | None:
        """Where the checkpoints of the run are."""
        return self._store.folder

    @property
    def latest_checkpoint_path(self) -> Path | str | None:
        """The newest file of the latest run that is there; None when there is none."""
        self.flush()
        return self._store.latest or self.best_checkpoint_path

    @property
    def best_checkpoint_path(self) -> Path | str | None:
        """The best file of the latest run; None when there is none."""
        self.flush()
        best = self._retention.best
        return self._store.path(best) if best is not None else None


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path | str) -> None:
    """Writes a file that is whole or not there.

    Raises:
        OSError: It could not be written; a `StorageError` for a URI.
    """
    from ray import cloudpickle

    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with saving(path) as file:
            cloudpickle.dump(dict(checkpoint), file, protocol=5)
    except StorageError as error:
        raise StorageError(f"{error} The trainer still has it as `latest_checkpoint`.") from error


def load_checkpoint(checkpoint: Mapping[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """A checkpoint: as it is if it is a dict, else read from a path or a URI.

    Reading runs what the file says, as any pickle.

    Raises:
        ValueError: There is nothing at that place.
        TypeError: It is neither a dict nor a path.
        StorageError: A store could not be reached.
    """
    if checkpoint is None:
        return None
    if isinstance(checkpoint, Mapping):
        return dict(checkpoint)
    if not isinstance(checkpoint, str | Path):
        raise TypeError(f"`checkpoint={checkpoint!r}`: need a dict, or the path or URI of a saved one.")
    if is_uri(checkpoint):
        place = open_folder(checkpoint, argument="checkpoint")
        if not place.is_local:
            return _read_from_store(place, checkpoint)
        checkpoint = place.local_path
    path = Path(checkpoint).expanduser()
    if not path.exists():
        raise ValueError(f"`checkpoint={str(checkpoint)!r}`: there is no such file.")
    return _read(path / DICT_FILE if path.is_dir() else path)


def _read_from_store(place: Folder, checkpoint: str | Path) -> dict[str, Any]:
    """Reads a file, or the file in a folder that holds a checkpoint."""
    try:
        with local_copy((place / DICT_FILE).uri if place.exists() else checkpoint) as path:
            return _read(Path(path))
    except FileNotFoundError:
        raise ValueError(f"`checkpoint={str(place)!r}`: there is no such file.") from None


def _read(path: Path) -> dict[str, Any]:
    from ray import cloudpickle

    with open(path, "rb") as file:
        found: dict[str, Any] = cloudpickle.load(file)
    return found
