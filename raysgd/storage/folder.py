"""`Folder`: the interface of every folder, on a disk or in a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import IO, Any


class Folder(ABC):
    """A folder on a disk or in a store, made by `open_folder`. Touches nothing until it is used; can be pickled.

    Names are those of files and folders in it; a name may have slashes. What is missing raises `FileNotFoundError`;
    everything else that goes wrong raises `StorageError`, an `OSError`.

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
        """The address of which `open_folder` makes the same folder. It may hold keys: show `str(folder)` instead."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The path in `filesystem`."""

    @property
    @abstractmethod
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` of the folder."""

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """True if it is on a disk that this machine has mounted."""

    @property
    @abstractmethod
    def is_in_memory(self) -> bool:
        """True if only this process sees it."""

    @property
    @abstractmethod
    def local_path(self) -> Path:
        """The path on the disk.

        Raises:
            ValueError: It is in a store.
        """

    @property
    def name(self) -> str:
        """The last part of its path."""
        return PurePosixPath(self.path).name

    @abstractmethod
    def __truediv__(self, name: str) -> Folder:
        """A folder in this one, whether or not it exists."""

    @abstractmethod
    def without_retries(self) -> Folder:
        """The same folder, of a store that is tried only once, as where it has just failed for long."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"Folder({str(self)!r})"

    # ------------------------------------------------------------------------------------------------ folders

    @abstractmethod
    def make(self) -> None:
        """Make the folder and those above it; writing into it does so too."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether there is such a folder."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of the files and folders in it, sorted; none where it does not exist.

        In a store, folders that were not committed yet are among them: see `committed`.
        """

    @abstractmethod
    def delete(self) -> None:
        """Delete it with everything in it. If it was committed, it stops being so first."""

    @abstractmethod
    def upload(self, source: Path, without: Collection[str] = ()) -> None:
        """Copy everything in a folder of this machine into this one. Each file is whole or not there.

        Args:
            source: The folder.
            without: Files in it that are left out.

        Raises:
            FileNotFoundError: There is no folder `source`.
        """

    @abstractmethod
    def download(self, target: Path) -> None:
        """Copy everything in it into a folder of this machine, which is made.

        Raises:
            FileNotFoundError: This folder does not exist.
        """

    # ------------------------------------------------------------------------------------------------ files

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""

    def read(self, name: str) -> bytes:
        """The content of a file."""
        with self.reading(name) as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file: at any moment there is the whole old one or the whole new one."""
        with self.writing(name) as file:
            file.write(data)

    @abstractmethod
    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to this machine; `target` is whole or not there."""

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading; from a store it is fetched first."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file, for writing and reading, that takes its name when the block ends without an exception."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""

    # ------------------------------------------------------------------------------------------------ commits

    @abstractmethod
    def staged(self, name: str) -> Folder:
        """Return where one or several processes put what becomes `name`. Use a name once.

        In a store, files that are put there have to stay as they are: `download` compares their checksums. Those
        whose names begin with a dot may be replaced.
        """

    @abstractmethod
    def commit(self, name: str) -> Folder:
        """Make what was staged for `name` whole, in one step; return it. One process does this, when all are done.

        A second call does nothing.

        Raises:
            FileNotFoundError: Nothing was staged.
            StorageError: On a disk: there is a folder of this name already.
        """

    @abstractmethod
    def committed(self) -> list[str]:
        """The names of the folders in it that are whole, sorted.

        On a disk these are all its folders; in a store those for which `commit` was called.
        """

    @abstractmethod
    def discard_staged(self, prefix: str) -> None:
        """Delete what was staged and not committed under names that begin with `prefix`, and what a kill left of them.

        Call it when no one is writing there, as before a run goes on.
        """


def check_name(name: str) -> str:
    """A name that lies inside of a folder.

    Raises:
        ValueError: It is empty, absolute, or leads out of the folder.
    """
    if not lies_inside(name):
        raise ValueError(f"`name={name!r}`: need the name of something in the folder, such as 'a' or 'a/b'.")
    return name


def lies_inside(name: str) -> bool:
    """Return whether a name is that of something inside of a folder.

    >>> lies_inside("a/b"), lies_inside("a/../../b"), lies_inside("/a")
    (True, False, False)
    """
    return not {"", ".", ".."} & set(name.split("/")) and "\0" not in name


def check_single(name: str) -> str:
    """The name of something directly in a folder.

    Raises:
        ValueError: It is not one, or has slashes.
    """
    if "/" in name:
        raise ValueError(f"`name={name!r}`: need the name of a folder directly in this one, without slashes.")
    return check_name(name)
