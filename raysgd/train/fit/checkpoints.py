"""Runs in the driver, and moves a run's checkpoints from the workers to the trial's folder.

A checkpoint is a dict or a folder. A dict is sent to the driver, which writes it to a file. A folder is stored by the
workers: all ranks write their files to the same staging folder. The driver then commits the staging folder, which turns
the folder atomically into a checkpoint. ADR 94 explains why the driver numbers the checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from raysgd.air.checkpoint import DICT_FILE, EXTRA_FILES_KEY, FOLDER_KEY, META_SUFFIX, METADATA_FILE, Checkpoint
from raysgd.air.constants import PREPROCESSOR_KEY
from raysgd.air.trial import checkpoint_name
from raysgd.storage import Folder, StorageError
from raysgd.train.checkpoint import CheckpointTaker
from raysgd.train.constants import TUNE_CHECKPOINT_ID
from raysgd.train.fit.fit_session import METADATA_KEY, checkpoint_at

Landing: TypeAlias = "Future[Checkpoint | None]"
"""A future of a checkpoint. Its result is None if the checkpoint was lost or could not be received.

The future is done when the checkpoint was written, or when receiving it failed. If writing fails, the future is never
done, and `add` or `flush` of `FitCheckpoints` raises the error.
"""


class FitCheckpoints(CheckpointTaker):
    """Receives the checkpoints of a run, and creates a folder for each checkpoint.

    Args:
        folder: The trial's folder. None to write no files and keep only the newest checkpoint, in memory.
        next_index: Number of the first checkpoint.
        begin_from: The checkpoint that the run starts from.
        metadata: Metadata to add to checkpoints. A checkpoint's own values take precedence.
        preprocessor: Preprocessor to add to checkpoints that lack a preprocessor.
        on_attempt: Function to call each time before the training function starts or restarts.

    Attributes:
        landing: Future of the newest checkpoint; see `Landing`. None before the first checkpoint.
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
        self.next_index: int = next_index
        self._metadata = dict(metadata or {})
        self._preprocessor = preprocessor
        self._on_attempt = on_attempt
        self.landing: Landing | None = None
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
        landing: Future[Any] = Future()
        self.landing = landing
        if receive is None:
            committed = self._commit(index)
            self._newest = checkpoint_at(committed)
            self._note_landing(committed)
            landing.set_result(self._newest)
        else:
            keep, lose = partial(self._keep, index, landing), partial(landing.set_result, None)
            self._receive(index, receive, keep, lose)

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
            own = own_metadata or _metadata_in(staged)
            staged.write(METADATA_FILE, json.dumps({**self._metadata, **own}).encode())
        return self._folder.commit(name)

    def _keep(self, index: int, landing: Landing, content: dict[str, Any]) -> None:
        """Write a worker's checkpoint dict to a file. If the run writes no files, keep the dict in memory.

        Args:
            index: Number of the checkpoint.
            landing: Future for the resulting checkpoint.
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
        landing.set_result(checkpoint)


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


def _metadata_in(staged: Folder) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(staged.read(METADATA_FILE)) if staged.has(METADATA_FILE) else {}
    return metadata
