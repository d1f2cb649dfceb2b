"""The folder of a `Trainer` and the folders of its runs.

A folder on disk is represented by its path, a folder in a remote store by a `Folder`.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysgd.core.files import check_path
from raysgd.exceptions import OnFailure
from raysgd.storage import Folder, StorageError, open_folder
from raysgd.storage.files import is_uri
from raysgd.storage.opening import make_new
from raysgd.train import constants
from raysgd.train.utils import construct_path

logger = logging.getLogger(__name__)


def check_logdir(logdir: Any) -> None:
    """Check that `logdir` is a local folder or a folder's URI, without connecting to anything.

    Raises:
        TypeError: `logdir` is neither a string nor a path.
        ValueError: `logdir` is empty, or its scheme is unknown.
        ModuleNotFoundError: A package that the URI needs is missing.
    """
    if is_uri(logdir):
        open_folder(logdir, argument="logdir")
    else:
        check_path("logdir", logdir)


def make_logdir(log_dir: str | Path | None) -> Path | Folder:
    """Create a trainer's folder and return it. Without `log_dir`, the folder is named after the current time.

    Raises:
        StorageError: The store could not be reached.
    """
    if log_dir is None:
        folder = make_new(open_folder(_results()), time.strftime("train_%Y-%m-%d_%H-%M-%S"))
    else:
        check_logdir(log_dir)
        folder = open_folder(log_dir if is_uri(log_dir) else construct_path(log_dir, constants.DEFAULT_RESULTS_DIR))
        folder.make()
    logger.info("the results of this trainer go to %s", as_place(folder))
    return as_place(folder)


def as_folder(place: Path | Folder) -> Folder:
    """Convert a path to a `Folder`. Return a `Folder` unchanged."""
    return place if isinstance(place, Folder) else open_folder(place)


def as_place(folder: Folder) -> Path | Folder:
    """Convert a `Folder` on disk to a path for the user. Return a `Folder` in a remote store unchanged."""
    return folder.local_path if folder.is_local else folder


def make_run_dir(logdir: Path | Folder, number: int) -> tuple[int, Path | Folder]:
    """Create a run's folder with the lowest free number that is at least `number`. Return the number and the folder.

    A number is free if its folder does not exist yet.
    """
    while not _is_new(run_dir := logdir / f"run_{number:03d}"):
        number += 1
    return number, run_dir


def _is_new(run_dir: Path | Folder) -> bool:
    """Create a run's folder and return True. Return False if the folder already exists.

    In a remote store, checking and creating are two steps, so two programs at the same time may both get True.
    """
    if isinstance(run_dir, Folder):
        is_there = run_dir.exists()
        run_dir.make()
        return not is_there
    try:
        run_dir.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


@contextmanager
def local_run_dir(run_dir: Path | Folder) -> Iterator[Path]:
    """Yield a local folder for the files that callbacks write during a run.

    If the run's folder is in a remote store, upload the files at the end of the run. If the run has failed, an error of
    the upload is only logged.

    Raises:
        StorageError: The upload failed. The message names the local folder that still holds the files.
    """
    if isinstance(run_dir, Path):
        yield run_dir
        return
    local = Path(tempfile.mkdtemp(prefix=f"{run_dir.name}-", dir=_results()))
    logger.info("callbacks write to %s; this folder is uploaded to %s when the run ends", local, run_dir)

    def save() -> None:
        try:
            _send(local, run_dir)
        except StorageError as error:  # only log it, because the error that ended the run is raised
            logger.error("%s", error)

    with OnFailure(save):
        yield local
    _send(local, run_dir)


def _send(local: Path, run_dir: Folder) -> None:
    # Do not upload the checkpoints, which `fetch_checkpoints` has downloaded from the store.
    shutil.rmtree(local / constants.TRAIN_CHECKPOINT_SUBDIR, ignore_errors=True)
    try:
        run_dir.upload(local)
    except StorageError as error:
        raise StorageError(f"{error} The files of the callbacks are still in `{local}`.") from error


def fetch_checkpoints(run_dir: Path | Folder, local: Path) -> None:
    """Download a run's checkpoints from a remote store to the local folder in which callbacks look for them.

    Do nothing if the run's folder is on disk. If the store cannot be reached, log the error.
    """
    if isinstance(run_dir, Path):
        return
    try:
        (run_dir / constants.TRAIN_CHECKPOINT_SUBDIR).download(local / constants.TRAIN_CHECKPOINT_SUBDIR)
    except FileNotFoundError:  # the run saved no checkpoints
        pass
    except StorageError as error:
        logger.error("could not download the run's checkpoints for the callbacks: %s", error)


def _results() -> Path:
    folder = Path(constants.DEFAULT_RESULTS_DIR).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
