"""The user's cache folder. The library runs code from it, so no other user may be able to write there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str], home: str) -> str:
    """Return the path of raysgd's cache folder. The environment variable `RAYSGD_CACHE` can set it.

    By default, it is the folder `raysgd` in the user's cache folder.
    """
    return environment.get("RAYSGD_CACHE") or f"{environment.get('XDG_CACHE_HOME') or f'{home}/.cache'}/raysgd"


def make_private(folder: Path) -> None:
    """Create a folder and the missing folders above it, with access for this user only, and call `check_private`."""
    folder = Path(os.path.abspath(folder))
    for each in reversed([each for each in (folder, *folder.parents) if not os.path.lexists(each)]):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def check_private(path: Path) -> None:
    """Check that only this user and the administrator can change a file or folder, also by way of the folders above.

    A folder above may be writable for others if only owners can rename what is in it, as in `/tmp`.

    Raises:
        PermissionError: Another user owns, or can write to, the path, a folder above it or a link on the way.
    """
    os.stat(path)  # raises an error for links that form a circle
    for each in _way_to(path):
        status = os.lstat(each)
        if status.st_uid not in (0, os.getuid()):
            problem = f"belongs to another user (number {status.st_uid})"
        elif not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            problem = f"is writable for other users (mode {stat.S_IMODE(status.st_mode):o})"
        else:
            continue
        raise PermissionError(
            f"`{each}` {problem}, who could put code there that raysgd would run. Set `RAYSGD_CACHE` to a new folder "
            f"in your home folder, or run `chmod go-w {each}` if it is yours."
        )


def _way_to(path: Path) -> Iterator[str]:
    """Yield each folder and link that the system passes on the way to a path, also between two links, and the path."""
    place, names = os.sep, os.path.join(os.getcwd(), path).split(os.sep)[::-1]
    yield place
    while names:
        name = names.pop()
        if name == os.pardir:
            place = os.path.dirname(place)
        elif name not in ("", os.curdir):
            place = os.path.join(place, name)
            yield place
            if os.path.islink(place):
                target = os.readlink(place)
                names += target.split(os.sep)[::-1]
                place = os.sep if os.path.isabs(target) else os.path.dirname(place)
