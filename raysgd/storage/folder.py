"""`Folder`: a folder on disk. Its subclass `StoreFolder` is a folder in a store, with the same methods.

Committing a folder on disk renames it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

from raysgd.core.files import check_regular, flush_to_disk, replacing
from raysgd.core.imports import require
from raysgd.core.text.secrets import masked
from raysgd.storage import _transfers
from raysgd.storage._retrying import telling

_STAGED = ".staged-"
ADVICE = "Check that the disk is mounted and that you may write there, or use another place."
_telling = partial(telling, advice=ADVICE)


class Folder:
    """A folder on disk or in a store such as S3. Create it with `open_folder`.

    A `Folder` can be pickled, and connects to its store on first use. Names of files and subfolders are relative to the
    folder, and may contain slashes. If a file or folder is missing, methods raise `FileNotFoundError` unless
    documented otherwise. For all other failures, they raise `StorageError`, a subclass of `OSError`.

    Examples:
        >>> import tempfile
        >>> from raysgd.storage import open_folder
        >>> with tempfile.TemporaryDirectory() as path:
        ...     results = open_folder(path) / "results"
        ...     results.staged("epoch_1").write("loss", b"0.5")
        ...     print(results.committed())
        ...     print(results.commit("epoch_1").read("loss"), results.committed())
        []
        b'0.5' ['epoch_1']
    """

    def __init__(self, local_path: Path) -> None:
        self._local_path = local_path

    # ------------------------------------------------------------------------------------------------ location

    @property
    def uri(self) -> str:
        """URI that you can pass to `open_folder`. It may contain secret keys, so display `str(folder)` instead.

        If the folder was opened with `filesystem=`, the URI only identifies the folder. To open such a folder again,
        pass its `path` and `filesystem`.
        """
        return self.local_path.as_uri()

    @property
    def path(self) -> str:
        """Path of the folder in the PyArrow file system `filesystem`."""
        return str(self.local_path)

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` in which the folder is."""
        return require("pyarrow.fs", "storage", "`Folder.filesystem`").LocalFileSystem()

    is_local: ClassVar[bool] = True
    """True if the folder is on a disk that is mounted on this machine."""

    @property
    def is_in_memory(self) -> bool:
        """True if the folder is in the memory of this process, where no other process can see it."""
        return False

    @property
    def local_path(self) -> Path:
        """Path of the folder on disk.

        Raises:
            ValueError: The folder is in a store.
        """
        return self._local_path

    @property
    def name(self) -> str:
        """Name of the folder: the last component of its path."""
        return PurePosixPath(self.path).name

    def __truediv__(self, name: str) -> Folder:
        """Return the subfolder with this name. The subfolder need not exist."""
        return Folder(self.local_path / check_name(name))

    def without_retries(self) -> Folder:
        """Return an object for this folder that does not retry operations that fail.

        Use this after a store has just failed for a long time.
        """
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"Folder({str(self)!r})"

    # ------------------------------------------------------------------------------------------------ folders

    def make(self) -> None:
        """Create the folder and its parents. Writing a file into a folder does this automatically."""
        with _telling(f"make the folder `{self}`"):
            self.local_path.mkdir(parents=True, exist_ok=True)

    def exists(self) -> bool:
        """Return True if the folder exists."""
        return self.local_path.is_dir()

    def names(self) -> list[str]:
        """Return the sorted names of the files and subfolders in this folder.

        In a store, this includes subfolders that were not committed (see `committed`). Return an empty list if this
        folder does not exist.
        """
        with _telling(f"list `{self}`"):
            return sorted(entry.name for entry in self._entries() if not _is_hidden(entry.name))

    def delete(self) -> None:
        """Delete the folder and its content. If it is a committed folder, first remove it from `committed()`.

        Do nothing if the folder does not exist.
        """
        doomed = self.local_path.with_name(f"{_STAGED}{self.name}.deleted-{secrets.token_hex(4)}")
        with _telling(f"delete `{self}`"), contextlib.suppress(FileNotFoundError):
            os.rename(self.local_path, doomed)
            if doomed.is_symlink():
                doomed.unlink()
            else:
                shutil.rmtree(doomed)

    def upload(self, source: Path, without: Collection[str] = ()) -> None:
        """Copy the content of a local folder into this folder. Each file is written atomically.

        Args:
            source: The local folder.
            without: Relative paths of files that are not copied.

        Raises:
            FileNotFoundError: `source` does not exist.
        """
        with _telling(f"copy `{source}` to `{self}`"):
            _transfers.copy_tree(source, self.local_path, without)

    def download(self, target: Path) -> None:
        """Copy the content of this folder into a local folder, which is created if necessary.

        Raises:
            FileNotFoundError: This folder does not exist.
        """
        with _telling(f"copy `{self}` to `{target}`"):
            _transfers.copy_tree(self.local_path, target)

    # ------------------------------------------------------------------------------------------------ files

    def has(self, name: str) -> bool:
        """Return True if the folder has a file with this name."""
        return (self.local_path / check_name(name)).is_file()

    def read(self, name: str) -> bytes:
        """Return the content of the file with this name as bytes."""
        with self.reading(name) as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file with this name and content. Other processes never see an incomplete file."""
        with self.writing(name) as file:
            file.write(data)

    def fetch(self, name: str, target: Path) -> None:
        """Copy the file with this name to the local path `target`. Other processes never see an incomplete copy."""
        path = self.local_path / check_name(name)
        with _telling(f"copy `{path}` to `{target}`"):
            _transfers.copy_file(path, target)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """Open the file with this name for reading. A file in a store is downloaded first."""
        path = self.local_path / check_name(name)
        with _telling(f"read `{path}`"):
            check_regular(path)
            with open(path, "rb") as file:
                yield file

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file for writing and reading. It appears under its name at the end of the block.

        The new file replaces an earlier file with this name. If the block raises an exception, nothing changes.
        """
        path = self.local_path / check_name(name)
        with _telling(f"write `{path}`"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(str(path)) as file:
                yield file

    def remove(self, name: str) -> None:
        """Delete the file with this name if it exists."""
        path = self.local_path / check_name(name)
        with _telling(f"delete `{path}`"):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------ commits

    def staged(self, name: str) -> Folder:
        """Return the staging folder for the subfolder `name`. Write files there before you call `commit(name)`.

        `commit` turns the staging folder into the folder `name`. Use each name only once. In a store, do not replace
        files after you have written them, because `download` checks their checksums. Only files whose names start with
        a dot may be replaced.
        """
        return self / f"{_STAGED}{check_single(name)}"

    def commit(self, name: str) -> Folder:
        """Atomically turn the staging folder into the subfolder `name`, and return this subfolder.

        Only one process may call this method for a name. A second call does nothing.

        Raises:
            FileNotFoundError: There is no staging folder for this name.
            StorageError: On disk, a subfolder with this name already exists.
        """
        staged, whole = self.staged(name), self / name
        with _telling(f"commit `{whole}`"):
            if whole.exists() and not staged.exists():
                return whole
            _transfers.sync_tree(staged.local_path)
            if whole.local_path.exists():
                raise FileExistsError(errno.EEXIST, "a folder with this name exists already", whole.path)
            os.rename(staged.local_path, whole.local_path)
            flush_to_disk(self.local_path)
        return whole

    def committed(self) -> list[str]:
        """Return the sorted names of the committed subfolders.

        On disk, these are all subfolders except staging folders. In a store, they are the subfolders for which `commit`
        was called. Return an empty list if this folder does not exist.
        """
        with _telling(f"list `{self}`"):
            return sorted(entry.name for entry in self._entries() if entry.is_dir() and not _is_hidden(entry.name))

    def discard_staged(self, prefix: str) -> None:
        """Delete staging folders whose names start with `prefix`, such as those that killed processes have left.

        In a store, this deletes all subfolders with such names that were not committed. Call this method while no
        process writes there, for example before you resume a run.
        """
        with _telling(f"delete what was left in `{self}`"):
            for entry in self._entries():
                if entry.is_dir(follow_symlinks=False) and entry.name.startswith(f"{_STAGED}{prefix}"):
                    shutil.rmtree(entry.path)

    def _entries(self) -> list[os.DirEntry[str]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.local_path) as entries:
            return list(entries)
        return []


def check_name(name: str) -> str:
    """Check that a name can only refer to a file or folder inside a folder, and return the name.

    Raises:
        ValueError: The name is empty, absolute, or leads out of the folder.
    """
    if not lies_inside(name):
        raise ValueError(
            f"`name={masked(name)!r}`: need the name of a file or folder in this one, such as 'a' or 'a/b'."
        )
    return name


def lies_inside(name: str) -> bool:
    """Return True if a relative path stays inside its folder.

    To be safe, return False for any path that has an empty component, `.` or `..`.

    >>> lies_inside("a/b"), lies_inside("a/../../b"), lies_inside("/a")
    (True, False, False)
    """
    return not {"", ".", ".."} & set(name.split("/")) and "\0" not in name


def check_single(name: str) -> str:
    """Check that a name is that of a direct child of a folder, without slashes or `..`, and return the name.

    Raises:
        ValueError: The name contains slashes, or leads out of the folder.
    """
    if "/" in name:
        raise ValueError(f"`name={masked(name)!r}`: need the name of a folder directly in this one, without slashes.")
    return check_name(name)


def _is_hidden(name: str) -> bool:
    return name.startswith((_STAGED, _transfers.TEMPORARY))
