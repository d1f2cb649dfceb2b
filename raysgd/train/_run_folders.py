"""Folders of a trainer: one of its own, and in it one for each run. On disk they are paths, in a store `Folder`s."""

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
    """Check that `logdir` is a local folder or the URI of one, without connecting to anything.

    Raises:
        TypeError: It is neither text nor a path.
        ValueError: It is empty, or its scheme is unknown.
        ModuleNotFoundError: A package that the URI needs is missing.
    """
    if is_uri(logdir):
        open_folder(logdir, argument="logdir")
    else:
        check_path("logdir", logdir)


def make_logdir(log_dir: str | Path | None) -> Path | Folder:
    """Create the folder of a trainer and return it. Without a name, a new name contains the time.

    Raises:
        StorageError: A store could not be reached.
    """
    folder = _new() if log_dir is None else _given(log_dir)
    logger.info("the results of this trainer go to %s", folder)
    return folder


def _new() -> Path:
    return make_new(open_folder(_results()), time.strftime("train_%Y-%m-%d_%H-%M-%S")).local_path


def _given(log_dir: str | Path) -> Path | Folder:
    check_logdir(log_dir)
    folder = open_folder(log_dir if is_uri(log_dir) else construct_path(log_dir, constants.DEFAULT_RESULTS_DIR))
    folder.make()
    return as_place(folder)


def as_folder(place: Path | Folder) -> Folder:
    """Turn a place, which is what users see, into a `Folder`."""
    return place if isinstance(place, Folder) else open_folder(place)


def as_place(folder: Folder) -> Path | Folder:
    """Turn a folder into what users see: a path if it is on disk."""
    return folder.local_path if folder.is_local else folder


def make_run_dir(logdir: Path | Folder, number: int) -> tuple[int, Path | Folder]:
    """Create the next run folder that no other trainer has taken, and return its number and the folder."""
    while not _is_new(run_dir := logdir / f"run_{number:03d}"):
        number += 1
    return number, run_dir


def _is_new(run_dir: Path | Folder) -> bool:
    """Create the folder of a run and return True, unless it exists. In a store, two programs may succeed at once."""
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
    """Yield a local folder for what callbacks write during a run. At the end it is sent to the store.

    Raises:
        StorageError: It could not be sent. The message says where the files are on this machine.
    """
    if isinstance(run_dir, Path):
        yield run_dir
        return
    local = Path(tempfile.mkdtemp(prefix=f"{run_dir.name}-", dir=_results()))
    logger.info("callbacks write to %s, which goes to %s when the run ends", local, run_dir)

    def save() -> None:
        try:
            _send(local, run_dir)
        except StorageError as error:  # the error that ended the run matters more
            logger.error("%s", error)

    with OnFailure(save):
        yield local
    _send(local, run_dir)


def _send(local: Path, run_dir: Folder) -> None:
    shutil.rmtree(local / constants.TRAIN_CHECKPOINT_SUBDIR, ignore_errors=True)  # the store already has these
    try:
        run_dir.upload(local)
    except StorageError as error:
        raise StorageError(f"{error} What callbacks wrote is in `{local}`.") from error


def fetch_checkpoints(run_dir: Path | Folder, local: Path) -> None:
    """Download the checkpoints of a run to the folder where callbacks look for them."""
    if isinstance(run_dir, Path):
        return
    try:
        (run_dir / constants.TRAIN_CHECKPOINT_SUBDIR).download(local / constants.TRAIN_CHECKPOINT_SUBDIR)
    except FileNotFoundError:  # none were saved
        pass
    except StorageError as error:
        logger.error("callbacks do not find the checkpoints of the run: %s", error)


def _results() -> Path:
    folder = Path(constants.DEFAULT_RESULTS_DIR).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
