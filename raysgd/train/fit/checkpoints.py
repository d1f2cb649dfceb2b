"""Checkpoints of a run in the driver: from the workers into the folder of the trial.

A dict is sent to the driver, which writes it. A folder is stored by the workers, all ranks into the same place, and the
driver commits it. ADR 94 says why the driver numbers the checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from raysgd.air._contents import DICT_FILE, EXTRA_FILES_KEY, FOLDER_KEY, META_SUFFIX, METADATA_FILE
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.constants import PREPROCESSOR_KEY
from raysgd.air.trial import checkpoint_name
from raysgd.storage import Folder, StorageError
from raysgd.train.checkpoint import CheckpointTaker
from raysgd.train.constants import TUNE_CHECKPOINT_ID
from raysgd.train.fit.fit_session import METADATA_KEY, checkpoint_at

Landing: TypeAlias = "Future[Checkpoint | None]"
"""The checkpoint of a step, once it is in its final place; None if it was lost."""


class FitCheckpoints(CheckpointTaker):
    """Takes the checkpoints of a run, and makes a folder of each.

    Args:
        folder: The folder of the trial; None to keep the newest checkpoint in memory, and write none.
        next_index: Number of the first checkpoint.
        begin_from: The checkpoint that the run starts from.
        metadata: Metadata for checkpoints; a checkpoint's own values come first.
        preprocessor: Preprocessor for checkpoints that have none.
        on_attempt: Called before the function starts, for the first time or again.

    Attributes:
        landing: The checkpoint that was taken last; None before the first one.
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
        """Wait for the newest checkpoint, and return its place. The recorder keeps the newest one in any case."""
        self.flush()
        return place_of(self._newest)

    def begin_attempt(self) -> None:
        """Remove what the last attempt stored only partly, and announce another one."""
        self.flush()
        if self._folder is not None:
            self._folder.discard_staged("checkpoint_")
        self._on_attempt()

    def add(self, score: Any, receive: Callable[[], dict[str, Any]] | None) -> None:
        """Take the checkpoint of a step. For a dict, return at once: a thread receives it from its worker.

        Args:
            score: Not used: these checkpoints are ranked by the metrics that were reported with them.
            receive: Gets a dict from its worker; None if the workers have stored a folder.

        Raises:
            StorageError: The driver does not see what the workers stored.
            Exception: Receiving or writing an earlier checkpoint failed.
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
        """Make a checkpoint of the staged files with this number. Without `own_metadata`, staged metadata is used."""
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
        """Write a dict that was received, or keep it in memory if nothing is written."""
        own = content.pop(METADATA_KEY, {})
        if content.get(PREPROCESSOR_KEY) is None:  # as in a `TorchCheckpoint` that was made without one
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
    """Return the path or URI of a checkpoint; None if there is none, or it is in memory."""
    uri = None if checkpoint is None else checkpoint.uri
    return checkpoint.path if checkpoint is not None and uri is not None and uri.startswith("file://") else uri


def _write_dict(content: dict[str, Any], staged: Folder) -> None:
    """Write a dict. If it was made from a folder, write that folder again."""
    if FOLDER_KEY in content or EXTRA_FILES_KEY in content:
        with Checkpoint.from_dict(content).as_directory() as folder:
            staged.upload(Path(folder))
        return
    from ray import cloudpickle

    with staged.writing(DICT_FILE) as file:
        cloudpickle.dump(content, file, protocol=5)


def _write_preprocessor(preprocessor: Any, staged: Folder) -> None:
    """Add a preprocessor to the files that workers stored, unless these contain one."""
    file = f"{PREPROCESSOR_KEY}{META_SUFFIX}"
    if not any(staged.has(name) for name in (DICT_FILE, PREPROCESSOR_KEY, file)):
        from ray import cloudpickle

        staged.write(file, cloudpickle.dumps(preprocessor))


def _metadata_in(staged: Folder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(staged.read(METADATA_FILE)) if staged.has(METADATA_FILE) else {}
    return found
