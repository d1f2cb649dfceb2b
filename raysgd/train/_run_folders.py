"""The folders of a trainer: one for itself, in it one for each run. On a disk they are paths, in a store `Folder`s."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysgd._files import check_path
from raysgd.exceptions import OnFailure
from raysgd.storage import Folder, StorageError, open_folder
from raysgd.storage.files import is_uri
from raysgd.storage.opening import make_new
from raysgd.train import constants
from raysgd.train.utils import construct_path

logger = logging.getLogger(__name__)


def check_logdir(logdir: Any) -> None:
    """Refuse what is neither a folder of this machine nor the URI of one. Connects to nothing.

    Raises:
        TypeError: It is no text and no path.
        ValueError: It is empty, or its scheme is unknown.
        ModuleNotFoundError: A package that the URI needs is missing.
    """
    if is_uri(logdir):
        open_folder(logdir, argument="logdir")
    else:
        check_path("logdir", logdir)


def make_logdir(log_dir: str | Path | None) -> Path | Folder:
    """Make the folder of a trainer and return it; without a name, a new one with the time.

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
    """Return the folder at a place as users see it."""
    return place if isinstance(place, Folder) else open_folder(place)


def as_place(folder: Folder) -> Path | Folder:
    """Return a folder as users see it: on a disk it is a path."""
    return folder.local_path if folder.is_local else folder


def make_run_dir(logdir: Path | Folder, number: int) -> tuple[int, Path | Folder]:
    """Make the folder of a run and return its number and it: the next one that no other trainer has taken."""
    while not _is_new(run_dir := logdir / f"run_{number:03d}"):
        number += 1
    return number, run_dir


def _is_new(run_dir: Path | Folder) -> bool:
    """Make the folder of a run, unless it is there. In a store two programs may do that in the same moment."""
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
    """A folder of this machine for what callbacks write during a run; at the end it goes to the store.

    Raises:
        StorageError: It could not be sent. It is still on this machine, and the message says where.
    """
    if isinstance(run_dir, Path):
        yield run_dir
        return
    local = Path(tempfile.mkdtemp(prefix=f"{run_dir.name}-", dir=_results()))
    logger.info("callbacks write to %s, which goes to %s when the run ends", local, run_dir)

    def save() -> None:
        try:
            _send(local, run_dir)
        except StorageError as error:  # what ended the run matters more
            logger.error("%s", error)

    with OnFailure(save):
        yield local
    _send(local, run_dir)


def _send(local: Path, run_dir: Folder) -> None:
    shutil.rmtree(local / constants.TRAIN_CHECKPOINT_SUBDIR, ignore_errors=True)  # copies of what is there
    try:
        run_dir.upload(local)
    except StorageError as error:
        raise StorageError(f"{error} What callbacks wrote is in `{local}`.") from error


def fetch_checkpoints(run_dir: Path | Folder, local: Path) -> None:
    """Put the checkpoints of a run where callbacks look for them."""
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
