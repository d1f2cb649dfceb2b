"""Finds the checkpoints that a journal names, in the folder of the run, or in a folder that the user names.

A journal may come from a stranger, and name any path or store. Nothing else that it names is opened.
"""

from __future__ import annotations

import os
from pathlib import Path

from raysgd.core.files import is_inside
from raysgd.core.text.log_lines import printable
from raysgd.core.text.secrets import masked
from raysgd.journal.journal import Journal
from raysgd.storage import open_folder


def checkpoint_in_run(journal: Journal, step: int) -> Path | None:
    """Return the path of the checkpoint that was saved after a step, which may have been deleted.

    Return None if the journal names a store, or a path that leads out of the folder of the run, also through a link.
    """
    # An absolute path, because `open_folder` and Arrow would take a relative path such as `s3:/name` for a URI.
    path = Path(os.path.abspath(journal.folder)) / journal.checkpoints[step]
    return path if "://" not in journal.checkpoints[step] and _stays_inside(path, journal.folder) else None


def _stays_inside(path: Path, folder: Path) -> bool:
    """Return True if a checkpoint is in a folder after all links. So must be the files of a checkpoint in parts."""
    return all(is_inside(each, folder) for each in (path, *(path.iterdir() if path.is_dir() else ())))


def nearest_checkpoint(
    journal: Journal, step: int, folder: str | os.PathLike[str] | None = None, *, only_inside: bool = False
) -> tuple[int, str | None]:
    """Return the newest checkpoint from before a step: the step after which it was saved, and its path or URI.

    Skip checkpoints whose files were deleted. Return 0 and None if there is no such checkpoint.

    Args:
        journal: The journal of the run.
        step: Number of the step.
        folder: Path or URI of the folder with the checkpoints. Default: they are in the folder of the run.
        only_inside: True to skip checkpoints that are not in the folder of the run. Otherwise, the user has to say
            where they are.

    Raises:
        ValueError: The newest checkpoint is not in the folder of the run, and the user named no other folder. Or it is
            a link out of the folder that the user named.
        StorageError: The storage is unreachable.
    """
    before = [at for at in sorted(journal.checkpoints, reverse=True) if at < step]
    if folder is not None:
        opened = open_folder(folder, argument="checkpoints")
        if not opened.exists():
            raise ValueError(f"`checkpoints={masked(str(folder))!r}`: there is no such folder.")
        names = set(opened.names())
        named = ((at, journal.checkpoints[at].rpartition("/")[2].partition("?")[0]) for at in before)
        at, place = next(((at, opened / name) for at, name in named if name in names), (0, None))
        if place is None or not place.is_local:
            return at, None if place is None else place.uri
        if not _stays_inside(place.local_path, opened.local_path):
            raise ValueError(
                f"`{place}`, or a file in it, is a link out of its folder. Pass the folder to which it leads with "
                "`--checkpoints`."
            )
        return at, place.path
    for at in before:
        path = checkpoint_in_run(journal, at)
        if path is None and not only_inside:
            where = printable(masked(journal.checkpoints[at]).partition("?")[0])
            raise ValueError(
                f"the checkpoint of step {at} is not in the folder of the run, but at `{where}`. To read it, pass its "
                "folder with `--checkpoints FOLDER`, or with `checkpoints=...` in Python."
            )
        if path is not None and os.path.exists(path):
            return at, str(path)
    return 0, None
