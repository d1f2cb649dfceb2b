"""`LocalFolder`: a `Folder` on a disk of this machine. Committing a folder renames it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from raysgd.core.files import check_regular, flush_to_disk, replacing
from raysgd.core.imports import require
from raysgd.storage import _transfers
from raysgd.storage._retrying import telling
from raysgd.storage.folder import Folder, check_name, check_single

_STAGED = ".staged-"
_telling = partial(telling, advice="Check that the disk is mounted and that you may write there, or use another place.")


@dataclass(frozen=True, eq=False, repr=False)
class LocalFolder(Folder):
    """A folder on a disk of this machine. `Folder` documents the methods.

    Attributes:
        local_path: Absolute path of the folder.
    """

    is_local = True
    is_in_memory = False

    _local_path: Path

    @property
    def uri(self) -> str:
        return self._local_path.as_uri()

    @property
    def path(self) -> str:
        return str(self._local_path)

    @property
    def filesystem(self) -> Any:
        return require("pyarrow.fs", "storage", "`Folder.filesystem`").LocalFileSystem()

    @property
    def local_path(self) -> Path:
        return self._local_path

    def __truediv__(self, name: str) -> LocalFolder:
        return LocalFolder(self._local_path / check_name(name))

    def without_retries(self) -> LocalFolder:
        return self

    def __str__(self) -> str:
        return self.path

    def make(self) -> None:
        with _telling(f"make the folder `{self}`"):
            self._local_path.mkdir(parents=True, exist_ok=True)

    def make_unless_taken(self) -> bool:
        """Create the folder, whose parent must exist. Return False if there is a folder or a file of this name."""
        with _telling(f"make the folder `{self}`"), contextlib.suppress(FileExistsError):
            self._local_path.mkdir()
            return True
        return False

    def exists(self) -> bool:
        return self._local_path.is_dir()

    def names(self) -> list[str]:
        with _telling(f"list `{self}`"):
            return sorted(entry.name for entry in self._entries() if not _is_hidden(entry.name))

    def delete(self) -> None:
        """Delete the folder and its content.

        The folder is first renamed, so that no other process sees a folder with only a part of its content.
        """
        doomed = self._local_path.with_name(f"{_STAGED}{self.name}.deleted-{secrets.token_hex(4)}")
        with _telling(f"delete `{self}`"), contextlib.suppress(FileNotFoundError):
            os.rename(self._local_path, doomed)
            if doomed.is_symlink():
                doomed.unlink()
            else:
                shutil.rmtree(doomed)

    def upload(self, source: Path, without: Collection[str] = ()) -> None:
        with _telling(f"copy `{source}` to `{self}`"):
            _transfers.copy_tree(source, self._local_path, without)

    def download(self, target: Path) -> None:
        with _telling(f"copy `{self}` to `{target}`"):
            _transfers.copy_tree(self._local_path, target)

    def has(self, name: str) -> bool:
        return (self._local_path / check_name(name)).is_file()

    def fetch(self, name: str, target: Path) -> None:
        path = self._local_path / check_name(name)
        with _telling(f"copy `{path}` to `{target}`"):
            _transfers.copy_file(path, target)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        path = self._local_path / check_name(name)
        with _telling(f"read `{path}`"):
            check_regular(path)
            with open(path, "rb") as file:
                yield file

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        path = self._local_path / check_name(name)
        with _telling(f"write `{path}`"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(str(path)) as file:
                yield file

    def remove(self, name: str) -> None:
        path = self._local_path / check_name(name)
        with _telling(f"delete `{path}`"):
            path.unlink(missing_ok=True)

    def staged(self, name: str) -> LocalFolder:
        return self / f"{_STAGED}{check_single(name)}"

    def commit(self, name: str) -> LocalFolder:
        staged, whole = self.staged(name), self / name
        with _telling(f"commit `{whole}`"):
            if whole.exists() and not staged.exists():
                return whole
            _transfers.sync_tree(staged._local_path)
            if whole._local_path.exists():
                raise FileExistsError(errno.EEXIST, "a folder with this name exists already", whole.path)
            os.rename(staged._local_path, whole._local_path)
            flush_to_disk(self._local_path)
        return whole

    def committed(self) -> list[str]:
        with _telling(f"list `{self}`"):
            return sorted(entry.name for entry in self._entries() if entry.is_dir() and not _is_hidden(entry.name))

    def discard_staged(self, prefix: str) -> None:
        with _telling(f"delete what was left in `{self}`"):
            for entry in self._entries():
                if entry.is_dir(follow_symlinks=False) and entry.name.startswith(f"{_STAGED}{prefix}"):
                    shutil.rmtree(entry.path)

    def _entries(self) -> list[os.DirEntry[str]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._local_path) as entries:
            return list(entries)
        return []


def _is_hidden(name: str) -> bool:
    return name.startswith((_STAGED, _transfers.TEMPORARY))
