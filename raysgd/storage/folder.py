"""`Folder`: the interface of every folder, on disk or in a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import IO, Any


class Folder(ABC):
    """A folder on disk or in a store, made by `open_folder`. Can be pickled. Connects to nothing until it is used.

    Names are those of files and folders in it, possibly with slashes. If something is missing, methods raise
    `FileNotFoundError`. For all other failures they raise `StorageError`, an `OSError`.

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

    # ------------------------------------------------------------------------------------------------ where it is

    @property
    @abstractmethod
    def uri(self) -> str:
        """Address from which `open_folder` makes the same folder. It may contain keys: show `str(folder)` instead."""

    @property
    @abstractmethod
    def path(self) -> str:
        """Path in `filesystem`."""

    @property
    @abstractmethod
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` of the folder."""

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """True if it is on a disk that is mounted on this machine."""

    @property
    @abstractmethod
    def is_in_memory(self) -> bool:
        """True if only this process can see it."""

    @property
    @abstractmethod
    def local_path(self) -> Path:
        """Path on the disk.

        Raises:
            ValueError: The folder is in a store.
        """

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.path).name

    @abstractmethod
    def __truediv__(self, name: str) -> Folder:
        """Return a folder in this one. It need not exist."""

    @abstractmethod
    def without_retries(self) -> Folder:
        """Return the same folder without retries, for a store that has just failed for long."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"Folder({str(self)!r})"

    # ------------------------------------------------------------------------------------------------ folders

    @abstractmethod
    def make(self) -> None:
        """Make the folder and its parents. Writing into it does that, too."""

    @abstractmethod
    def exists(self) -> bool:
        """Return True if the folder exists."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the files and folders in it, sorted; empty if it does not exist.

        In a store, this includes folders that were not committed: see `committed`.
        """

    @abstractmethod
    def delete(self) -> None:
        """Delete the folder and its content. If it was committed, revoke that first."""

    @abstractmethod
    def upload(self, source: Path, without: Collection[str] = ()) -> None:
        """Copy everything from a folder of this machine into this one. Each file is complete or does not exist.

        Args:
            source: The folder.
            without: Files in it to leave out.

        Raises:
            FileNotFoundError: There is no folder `source`.
        """

    @abstractmethod
    def download(self, target: Path) -> None:
        """Copy everything in it into a folder of this machine. That folder is made.

        Raises:
            FileNotFoundError: This folder does not exist.
        """

    # ------------------------------------------------------------------------------------------------ files

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return True if there is a file with this name."""

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self.reading(name) as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file. At any moment, either the whole old file or the whole new one exists."""
        with self.writing(name) as file:
            file.write(data)

    @abstractmethod
    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to this machine. `target` is complete or does not exist."""

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading. A file in a store is fetched first."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for writing and reading. It gets its name if the block ends without an exception."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file if it exists."""

    # ------------------------------------------------------------------------------------------------ commits

    @abstractmethod
    def staged(self, name: str) -> Folder:
        """Return the folder in which processes put what becomes `name` with `commit`. Use a name once.

        In a store, files must not change after they were put there, because `download` compares their checksums. Only
        files whose names start with a dot may be replaced.
        """

    @abstractmethod
    def commit(self, name: str) -> Folder:
        """Turn what was staged for `name` into that folder, in one step, and return it. One process calls this.

        A second call does nothing.

        Raises:
            FileNotFoundError: Nothing was staged.
            StorageError: On disk: a folder with this name exists.
        """

    @abstractmethod
    def committed(self) -> list[str]:
        """Return the names of the committed folders in it, sorted.

        On disk, these are all its folders; in a store, those for which `commit` was called.
        """

    @abstractmethod
    def discard_staged(self, prefix: str) -> None:
        """Delete what was staged but not committed under names that start with `prefix`, including leftovers of kills.

        Call it when no process is writing there, such as before a run is resumed.
        """


def check_name(name: str) -> str:
    """Return the name if it lies inside a folder.

    Raises:
        ValueError: It is empty, absolute, or leads out of the folder.
    """
    if not lies_inside(name):
        raise ValueError(f"`name={name!r}`: need the name of something in the folder, such as 'a' or 'a/b'.")
    return name


def lies_inside(name: str) -> bool:
    """Return True for the name of something inside a folder.

    >>> lies_inside("a/b"), lies_inside("a/../../b"), lies_inside("/a")
    (True, False, False)
    """
    return not {"", ".", ".."} & set(name.split("/")) and "\0" not in name


def check_single(name: str) -> str:
    """Return the name if it is that of something directly in a folder.

    Raises:
        ValueError: It is not, or has slashes.
    """
    if "/" in name:
        raise ValueError(f"`name={name!r}`: need the name of a folder directly in this one, without slashes.")
    return check_name(name)
