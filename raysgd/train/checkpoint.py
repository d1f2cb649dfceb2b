"""Receives the checkpoints of training functions in the driver, one at a time, in a thread, and stores them.

`CheckpointManager` stores the best checkpoints of `Trainer.run` as files. `FitCheckpoints` moves the checkpoints of
`fit` to the trial's folder. A checkpoint of `fit` is a dict or a folder. A dict is sent to the driver, which writes it
to a file. A folder is stored by the workers: all ranks write their files to the same staging folder. The driver then
commits the staging folder, which turns the folder atomically into a checkpoint.

ADR 94 explains why the worker first copies a checkpoint and the driver fetches the copy later, and why the driver
numbers the checkpoints.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raysgd.air.checkpoint import (
    DICT_FILE,
    EXTRA_FILES_KEY,
    FOLDER_KEY,
    META_SUFFIX,
    Checkpoint,
    checkpoint_at,
)
from raysgd.air.config import CheckpointConfig
from raysgd.air.constants import PREPROCESSOR_KEY
from raysgd.air.trial import checkpoint_name
from raysgd.core.arguments import check_kind
from raysgd.core.cluster.ray_cluster import RayThreads, end_with
from raysgd.core.numbers.ranking import MAX, MIN, BestCheckpoints, SavedCheckpoint, as_score
from raysgd.core.text.secrets import masked
from raysgd.exceptions import failure_logged
from raysgd.storage import Folder, StorageError, open_folder
from raysgd.storage.files import local_copy, saving
from raysgd.train.constants import METADATA_KEY, TIMESTAMP, TRAIN_CHECKPOINT_SUBDIR, TUNE_CHECKPOINT_ID

__all__ = [
    "MAX",
    "MIN",
    "CheckpointLostError",
    "CheckpointManager",
    "CheckpointStrategy",
    "checked_strategy",
    "load_checkpoint",
    "write_checkpoint",
]

logger = logging.getLogger(__name__)

_ARRIVAL_S = 10.0
"""How many seconds to wait, after a failure, for a checkpoint that a worker is still sending. If that worker has died,
the wait ends immediately. If it is frozen, the checkpoint may never arrive."""


def as_place(folder: Folder) -> Path | Folder:
    """Convert a `Folder` on disk to a path for the user. Return a `Folder` in a remote store unchanged."""
    return folder.local_path if folder.is_local else folder


class CheckpointLostError(Exception):
    """Raised if a checkpoint was lost on its way to the driver, usually because the worker that was sending it died.

    A restart continues from the previous checkpoint.
    """


class CheckpointTaker(ABC):
    """Receives the checkpoints of a run in the driver.

    Checkpoints are received one after another in a thread, while the training functions continue.

    Attributes:
        next_index: Number of the next checkpoint, for workers that store checkpoints themselves.
        landing: Future of the newest checkpoint: of the stored checkpoint, or of None if it was lost. None before the
            first checkpoint.

    Args:
        restart_point: The checkpoint that the run starts from; None to start from the beginning.
    """

    next_index = 0

    def __init__(self, restart_point: Any = None) -> None:
        self._restart_point = restart_point
        self._num_landed = self._num_counted = 0
        self._threads = RayThreads()
        self._coming: Future[Any] | None = None
        self.landing: Future[Any] | None = None
        self._has_arrived = threading.Event()
        self._identity = 0
        end_with(self, self._threads.join)

    @abstractmethod
    def add(self, score: Any, receive: Callable[[], dict[str, Any]] | None) -> None:
        """Add a checkpoint that the training function has saved.

        Args:
            score: Value that ranks the checkpoint.
            receive: Function that gets the checkpoint from the worker; None if the workers have stored it themselves.
        """

    @abstractmethod
    def keep_newest(self) -> str | None:
        """Wait for the newest checkpoint and store it, even if it is not one of the best.

        Returns:
            The checkpoint's path or URI; None if there is no checkpoint, or if checkpoints are not written to files.

        Raises:
            Exception: Receiving or writing the checkpoint failed. If writing failed, the error is an `OSError`.
        """

    def begin_attempt(self) -> None:  # noqa: B027 - subclasses need not override it
        """Prepare for an attempt of the run. Called each time before the function starts or restarts on all workers."""

    @property
    def restart_point(self) -> Any:
        """The checkpoint for a restart: the newest checkpoint, or else the checkpoint from which the run started."""
        self.flush()
        return self._restart_point

    def take_landing(self) -> bool:
        """Return True if a checkpoint has been completely received since the last call to this method.

        If a checkpoint is just being received, wait for it. Without this wait, the answer would depend on timing. If
        receiving the checkpoint failed, this method raises no error, but the next `flush` does.
        """
        if self._coming is not None and self._has_arrived.wait(_ARRIVAL_S):
            wait([self._coming])
        counted, self._num_counted = self._num_counted, self._num_landed
        return self._num_landed > counted

    def await_arrival(self, timeout_s: float) -> None:
        """Wait until no worker is sending a checkpoint, but at most `timeout_s` seconds.

        Afterwards, the checkpoint may be lost, or received but not written yet.
        """
        if self._coming is not None and not self._has_arrived.wait(timeout_s):
            logger.warning(
                "checkpoint %s did not arrive within %g s; stopping its worker anyway", self._identity, timeout_s
            )

    def flush(self) -> None:
        """Wait until the newest checkpoint has been received and written, or was lost.

        Raises:
            Exception: Receiving or writing the checkpoint failed. If writing failed, the error is an `OSError`.
        """
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.result()

    def _receive(
        self, identity: int, receive: Callable[[], dict[str, Any]], keep: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Start a thread that receives a checkpoint. Call `flush` first, because only one such thread may run.

        Args:
            identity: Number of the checkpoint.
            receive: Function that returns the checkpoint, or raises `CheckpointLostError` if it was lost.
            keep: Function to call in the thread with the received checkpoint.
        """
        self._identity = identity
        self._has_arrived.clear()
        self.landing = self._coming = self._threads.start(partial(self._land, receive, keep), "raysgd-checkpoint")

    def _land(self, receive: Callable[[], dict[str, Any]], keep: Callable[[dict[str, Any]], Any]) -> Any:
        try:
            checkpoint = receive()
        except CheckpointLostError as error:
            logger.warning("checkpoint %s was lost with its worker: %s", self._identity, error)
            return None
        finally:
            self._has_arrived.set()
        return keep(checkpoint)

    def _note_landing(self, restart_point: Any) -> None:
        """Record that a checkpoint was completely received, so that a restart continues from this checkpoint."""
        self._restart_point = restart_point
        self._num_landed += 1


@dataclass
class CheckpointStrategy:
    """Decides which checkpoints of a run stay on disk.

    Attributes:
        num_to_keep: Number of checkpoints to keep. None keeps all. With 0, no checkpoint is written: only the latest is
            kept, in memory.
        checkpoint_score_attribute: Key in a checkpoint whose value ranks the checkpoint.
        checkpoint_score_order: "max" if the highest value is best, "min" if the lowest is. Of checkpoints with equal
            values, the newer ranks higher.

    Raises:
        ValueError: A value is not allowed.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str = TIMESTAMP
    checkpoint_score_order: str = MAX

    def __post_init__(self) -> None:
        if self.checkpoint_score_attribute is None:
            raise ValueError("`checkpoint_score_attribute=None`: need the name of a value in the checkpoints.")
        # Create a `CheckpointConfig` only because it validates the values.
        CheckpointConfig(self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order)


def checked_strategy(strategy: CheckpointStrategy | CheckpointConfig | None) -> CheckpointStrategy | None:
    """Validate the strategy of a run and return it. Convert a `CheckpointConfig`, which Ray 2.0 also accepts.

    Raises:
        TypeError: `strategy` is neither a `CheckpointStrategy`, a `CheckpointConfig` nor None.
    """
    if isinstance(strategy, CheckpointConfig):
        score = strategy.checkpoint_score_attribute or TIMESTAMP
        return CheckpointStrategy(strategy.num_to_keep, score, strategy.checkpoint_score_order)
    what = "a `CheckpointStrategy`, such as `CheckpointStrategy(num_to_keep=2)`, or None, which keeps all"
    check_kind("checkpoint_strategy", strategy, CheckpointStrategy | None, what)
    return strategy


def checked_score(strategy: CheckpointStrategy, score: Any) -> float | None:
    """Check the value by which a checkpoint is ranked, and return it as a number.

    Return None if the strategy keeps no checkpoints on disk.

    Raises:
        ValueError: The value is missing or not a number.
    """
    if strategy.num_to_keep == 0:
        return None
    name = strategy.checkpoint_score_attribute
    if score is None:
        raise ValueError(
            f"The checkpoint has no {name!r}, by which `checkpoint_score_attribute` has it judged: pass it to "
            "`save_checkpoint`."
        )
    number = as_score(score)
    if number is None:
        raise ValueError(f"The checkpoint's {name!r} is {score!r}: the score must be a number.")
    return number


class CheckpointManager(CheckpointTaker):
    """Receives the checkpoints of one run after another, and stores the best checkpoints of each run as files.

    Attributes:
        latest_checkpoint_id: Number of the newest checkpoint, counted from 1. Before a run's first checkpoint, the
            `latest_id` that was passed to `begin_run`, or 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[str, Any] | None = None
        self.begin_run(None)

    def begin_run(
        self,
        run_dir: Path | Folder | None,
        checkpoint: dict[str, Any] | None = None,
        strategy: CheckpointStrategy | None = None,
        latest_id: int | None = None,
    ) -> None:
        """Prepare for a run, after waiting for the last checkpoint of the previous run.

        Args:
            run_dir: Folder of the run. Checkpoints are written to a subfolder. None to write no files.
            checkpoint: The checkpoint that the run starts from.
            strategy: Decides which checkpoints to keep; None to keep all.
            latest_id: Number of the last checkpoint before this run. The run continues the numbering.
        """
        with failure_logged(logger.error, "could not keep the last checkpoint of the previous run: %r"):
            self.flush()
        self._restart_point = checkpoint
        folder = run_dir if isinstance(run_dir, Folder | None) else open_folder(run_dir)
        self._folder = folder and folder / TRAIN_CHECKPOINT_SUBDIR
        self._strategy = strategy = strategy or CheckpointStrategy()
        self._rule = BestCheckpoints(strategy.num_to_keep, strategy.checkpoint_score_order)
        self._saved: list[SavedCheckpoint[None]] = []
        self._unwritten: SavedCheckpoint[dict[str, Any]] | None = None
        self.latest_checkpoint_id = latest_id or 0

    @property
    def score_attribute(self) -> str:
        """Key in a checkpoint whose value ranks the checkpoint."""
        return self._strategy.checkpoint_score_attribute

    def add(self, score: Any, receive: Callable[[], dict[str, Any]] | None) -> None:
        """Wait until the previous checkpoint is written, and start a thread that receives the next checkpoint.

        Args:
            score: Value that ranks the checkpoint.
            receive: Function that returns the checkpoint, or raises `CheckpointLostError` if it was lost.

        Raises:
            ValueError: `score` is missing or not a number.
            Exception: Receiving or writing the previous checkpoint failed. If writing failed, it is an `OSError`.
        """
        assert receive is not None, "no worker stores a checkpoint itself"
        number = checked_score(self._strategy, score)
        self.flush()
        self.latest_checkpoint_id = identity = self.latest_checkpoint_id + 1
        self._receive(identity, receive, partial(self._keep, identity, number))

    def _keep(self, identity: int, score: float | None, checkpoint: dict[str, Any]) -> None:
        self._latest = checkpoint
        self._note_landing(checkpoint)
        new = SavedCheckpoint(identity, score, None)
        kept, dropped = self._rule.divide([*self._saved, new])
        place = self._place_of(identity)
        if place is None or new not in kept:
            self._unwritten = SavedCheckpoint(identity, score, checkpoint)
            return
        write_checkpoint(checkpoint, place)
        self._saved, self._unwritten = kept, None
        assert self._folder is not None, "it has a place"
        for each in dropped:
            self._folder.remove(checkpoint_name(each.number))

    def keep_newest(self) -> str | None:
        """Wait for the newest checkpoint and write it to a file, even if it is not one of the best.

        Return the path or URI of the newest file, or None if there is no file.
        """
        self.flush()
        new = self._unwritten
        if new is not None and self._strategy.num_to_keep != 0 and (place := self._place_of(new.number)) is not None:
            write_checkpoint(new.content, place)
            self._saved, self._unwritten = [*self._saved, SavedCheckpoint(new.number, new.score, None)], None
        newest = self.latest_checkpoint_path
        return None if newest is None else str(newest)

    # ---------------------------------------------------------------------------------------------------------- results

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The content of the newest checkpoint of any run; None if no checkpoint was saved."""
        self.flush()
        return self._latest

    @property
    def latest_checkpoint_dir(self) -> Path | Folder | None:
        """The folder for the checkpoint files of the latest run; None if the run has no folder."""
        return as_place(self._folder) if self._folder is not None else None

    @property
    def latest_checkpoint_path(self) -> Path | str | None:
        """The path or URI of the latest run's newest checkpoint file; None if the run has no file.

        If the newest file was deleted, this is the best checkpoint file instead.
        """
        self.flush()
        newest = self._saved[-1].number if self._saved else None
        if self._folder is not None and newest is not None and self._folder.has(checkpoint_name(newest)):
            return self._place_of(newest)
        return self.best_checkpoint_path

    @property
    def best_checkpoint_path(self) -> Path | str | None:
        """The path or URI of the latest run's best checkpoint file; None if the run has no file."""
        self.flush()
        best = self._rule.best(self._saved)
        return self._place_of(best[-1].number) if best else None

    def _place_of(self, identity: int) -> Path | str | None:
        """Return the path or URI of a checkpoint's file, or None if the run has no folder."""
        if self._folder is None:
            return None
        file = self._folder / checkpoint_name(identity)
        return file.local_path if file.is_local else file.uri


class FitCheckpoints(CheckpointTaker):
    """Receives the checkpoints of a run, and creates a folder for each checkpoint.

    Args:
        folder: The trial's folder. None to write no files and keep only the newest checkpoint, in memory.
        next_index: Number of the first checkpoint.
        begin_from: The checkpoint that the run starts from.
        metadata: Metadata to add to checkpoints. A checkpoint's own values take precedence.
        preprocessor: Preprocessor to add to checkpoints that lack a preprocessor.
        on_attempt: Function to call each time before the training function starts or restarts.
    """

    def __init__(
        self,
        folder: Folder | None,
        next_index: int = 0,
        begin_from: Checkpoint | None = None,
        metadata: Mapping[str, Any] | None = None,
        preprocessor: Any = None,
        on_attempt: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(begin_from)
        self._folder = folder
        self.next_index = next_index
        self._metadata = dict(metadata or {})
        self._preprocessor = preprocessor
        self._on_attempt = on_attempt
        self._newest = begin_from

    def keep_newest(self) -> str | None:
        """Wait until the newest checkpoint is written, and return its path or URI.

        Nothing else is needed, because the recorder never deletes the newest checkpoint. If the run has no checkpoint
        yet, return the location of the checkpoint that the run started from. Return None for a checkpoint in memory.
        """
        self.flush()
        return place_of(self._newest)

    def begin_attempt(self) -> None:
        """Delete staging folders that the last attempt of the run has left, and call `on_attempt`."""
        self.flush()
        if self._folder is not None:
            self._folder.discard_staged("checkpoint_")
        self._on_attempt()

    def add(self, score: Any, receive: Callable[[], dict[str, Any]] | None) -> None:
        """Add the checkpoint of a step. Commit a folder that workers stored, or start a thread that receives a dict.

        Args:
            score: Unused, because these checkpoints are ranked by the metrics that were reported with them.
            receive: Function that gets the dict from its worker; None if the workers have stored a folder.

        Raises:
            StorageError: The driver cannot find the files that the workers stored.
            Exception: Receiving or writing the previous checkpoint failed.
        """
        self.flush()
        index, self.next_index = self.next_index, self.next_index + 1
        if receive is None:
            committed = self._commit(index)
            self._newest = checkpoint_at(committed)
            self._note_landing(committed)
            self.landing = Future()
            self.landing.set_result(self._newest)
        else:
            self._receive(index, receive, partial(self._keep, index))

    def _commit(self, index: int, own_metadata: Mapping[str, Any] | None = None) -> Folder:
        """Add metadata and the preprocessor to a staging folder, and turn it into a checkpoint. Return the new folder.

        Args:
            index: Number of the checkpoint.
            own_metadata: The checkpoint's own metadata. Default: the metadata in the staging folder.
        """
        assert self._folder is not None, "nothing is staged where no files are kept"
        name = checkpoint_name(index)
        staged = self._folder.staged(name)
        if not staged.exists():
            raise StorageError(
                f"`storage_path`: the workers stored {name} in {self._folder}, and the driver does not find it there. "
                "Use a folder that all nodes share, or a URI such as `s3://bucket/folder`."
            )
        if self._preprocessor is not None:
            _write_preprocessor(self._preprocessor, staged)
        if self._metadata or own_metadata:
            marked = Checkpoint(staged)
            marked.set_metadata({**self._metadata, **(own_metadata or marked.get_metadata())})
        return self._folder.commit(name)

    def _keep(self, index: int, content: dict[str, Any]) -> Checkpoint:
        """Write a worker's checkpoint dict to a file. If the run writes no files, keep the dict in memory.

        Args:
            index: Number of the checkpoint.
            content: The dict.
        """
        own = content.pop(METADATA_KEY, {})
        if content.get(PREPROCESSOR_KEY) is None:  # the key is missing, or a `TorchCheckpoint` stores None under it
            content = {**content, PREPROCESSOR_KEY: self._preprocessor}
        content = {**content, TUNE_CHECKPOINT_ID: index}
        if self._folder is None:
            checkpoint = Checkpoint.from_dict(content)
            checkpoint.set_metadata({**self._metadata, **own})
        else:
            staged = self._folder.staged(checkpoint_name(index))
            _write_dict(content, staged)
            checkpoint = checkpoint_at(self._commit(index, own))
        self._newest = checkpoint
        self._note_landing(content)
        return checkpoint


def place_of(checkpoint: Checkpoint | None) -> str | None:
    """Return the path or URI of a checkpoint. Return None if there is no checkpoint or it is in memory."""
    uri = None if checkpoint is None else checkpoint.uri
    return checkpoint.path if checkpoint is not None and uri is not None and uri.startswith("file://") else uri


def _write_dict(content: dict[str, Any], staged: Folder) -> None:
    """Write a checkpoint dict to a staging folder. If the dict was made from a folder, write the folder's files."""
    if FOLDER_KEY in content or EXTRA_FILES_KEY in content:
        with Checkpoint.from_dict(content).as_directory() as folder:
            staged.upload(Path(folder))
        return
    from ray import cloudpickle

    with staged.writing(DICT_FILE) as file:
        cloudpickle.dump(content, file, protocol=5)


def _write_preprocessor(preprocessor: Any, staged: Folder) -> None:
    """Add a preprocessor to a staging folder, unless the folder contains a preprocessor or a checkpoint dict."""
    file = f"{PREPROCESSOR_KEY}{META_SUFFIX}"
    if not any(staged.has(name) for name in (DICT_FILE, PREPROCESSOR_KEY, file)):
        from ray import cloudpickle

        staged.write(file, cloudpickle.dumps(preprocessor))


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path | str) -> None:
    """Write a checkpoint to a file atomically.

    Raises:
        OSError: The file could not be written. If `path` is a URI, the error is a `StorageError`.
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
    """Return the content of a checkpoint: a copy of the dict, or the content of the file at a path or URI.

    The path or URI may also lead to the folder of a dict checkpoint that `fit` has stored. Return None for None.
    Loading a file may run code from the file, as with any pickle.

    Raises:
        ValueError: The file does not exist.
        TypeError: `checkpoint` is neither a dict, a path nor None.
        StorageError: The store could not be reached.
    """
    if checkpoint is None:
        return None
    if isinstance(checkpoint, Mapping):
        return dict(checkpoint)
    check_kind("checkpoint", checkpoint, str | Path, "a dict, or the path or URI of a saved one")
    from ray import cloudpickle

    place = open_folder(checkpoint, argument="checkpoint")
    with ExitStack() as opened:
        try:
            path = opened.enter_context(local_copy((place / DICT_FILE if place.exists() else place).uri))
            file = opened.enter_context(open(path, "rb"))
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"`checkpoint={masked(str(place))!r}`: there is no such file.") from None
        content: dict[str, Any] = cloudpickle.load(file)
    return content
