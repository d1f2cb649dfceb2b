"""`StoreFolder`: a `Folder` in a store, such as S3. `open_folder` and `make_new`: any folder, by its path or URI.

Operations that fail temporarily are retried.

To commit a folder `name`, a marker file `.complete-name` is written beside the folder after all files. Listing the
parent folder once is thus enough to see which folders are committed. Files are written to their final location before
the commit, because stores cannot rename, only copy.

Each upload into a staging folder also writes a file `.raysgd-sums-*` with the XXH128 checksum of each uploaded file.
Files whose names start with a dot are not in this list, because they are metadata that may be replaced later.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from raysgd.core.text.secrets import masked
from raysgd.exceptions import StorageError
from raysgd.storage import _filesystems, _retrying, _transfers, _uris
from raysgd.storage.folder import ADVICE, Folder, check_name, check_single, lies_inside

_MARKER = ".complete-"
_LIST = f"{_transfers.TEMPORARY}sums-"
_CONTENT = b"The folder beside this file, of the same name, is complete.\n"

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class StoreFolder(Folder):
    """A folder in a store, such as S3. `Folder` documents the methods.

    Some private methods use an object of this class to represent a file. Then `path` is the path of the file.

    Attributes:
        root: The URI that the user passed to `open_folder`. With `given`, a URI that only identifies the folder,
            made from the type of `given` and from `base`.
        given: A file system that the user created, or None to use the file system for the URI `root`.
        base: The path in the file system `given` that the user passed to `open_folder`. Empty if `given` is None.
        patience_s: For how many seconds operations that fail are retried.
        inside: Path of the folder relative to `root`.
        is_staged: True for a staging folder. Its files must not change after they were uploaded.
    """

    is_local = False

    root: str
    given: Any = None
    base: str = ""
    patience_s: float = _retrying.DEFAULT_S
    inside: str = ""
    is_staged: bool = False

    @property
    def uri(self) -> str:
        return _uris.child_of(self.root, self.inside)

    @property
    def path(self) -> str:
        return _joined(self._opened[1], self.inside)

    @property
    def filesystem(self) -> Any:
        return self._opened[0]

    @property
    def _opened(self) -> tuple[Any, str]:
        """The file system of the store, and the path of `root` in this file system."""
        if self.given is not None:
            return self.given, self.base
        return self._ask(f"open `{self}`", partial(_filesystems.opened, self.root, self.patience_s))

    @property
    def is_in_memory(self) -> bool:
        return self.root.startswith("memory:")

    @property
    def local_path(self) -> Path:
        raise ValueError(f"`{self}` is not on a disk of this machine: use `download`.")

    @property
    def name(self) -> str:
        return self.uri.partition("?")[0].rstrip("/").rpartition("/")[2]

    def __truediv__(self, name: str) -> StoreFolder:
        return replace(self, inside=_joined(self.inside, check_name(name)))

    def without_retries(self) -> StoreFolder:
        return replace(self, patience_s=0)

    def __str__(self) -> str:
        return masked(self.uri)

    # ------------------------------------------------------------------------------------------------ folders

    def make(self) -> None:
        self._ask(f"make the folder `{self}`", partial(_filesystems.make_folder, self.filesystem, self.path))

    def exists(self) -> bool:
        return self._is_a("Directory")

    def names(self) -> list[str]:
        return sorted(name for name in self._children() if not name.startswith((_MARKER, _transfers.TEMPORARY)))

    def delete(self) -> None:
        above, _, name = self.path.rpartition("/")
        if above:
            self._delete(self.filesystem.delete_file, f"{above}/{_MARKER}{name}")
        if self.exists():  # check first: not every store raises `FileNotFoundError` when a missing folder is deleted
            self._delete(self.filesystem.delete_dir, self.path)

    def upload(self, source: Path, without: Collection[str] = ()) -> None:
        with _retrying.telling(
            f"copy `{source}` to `{self}`", "Copy only files and folders that this process can read."
        ):
            files, empty = _transfers.tree_of(source)
        if not files and not empty:
            self.make()
        _transfers.on_threads(lambda name: (self / name).make(), empty)
        sent = [name for name in files if name not in without]
        self._list(_transfers.on_threads(lambda name: self._upload_file(source / name, name), sent))

    def _upload_file(self, source: Path, name: str) -> str:
        """Upload a local file under this name, and return its checksum."""
        with open(source, "rb") as file:
            return (self / name)._send(file)

    def _list(self, sums: Mapping[str, str]) -> None:
        """If this is a staging folder, write a file that lists the checksums of files that were just uploaded.

        Args:
            sums: The checksum of each of these files, by path relative to this folder. Files whose names start with a
                dot do not get into the list, because they may be replaced later.
        """
        lasting = {name: checksum for name, checksum in sums.items() if not _base(name).startswith(".")}
        if self.is_staged and lasting:
            self.write(f"{_LIST}{secrets.token_hex(8)}", json.dumps(lasting).encode())

    def download(self, target: Path) -> None:
        names = self._everything()
        target.mkdir(parents=True, exist_ok=True)
        for name in (name for name, is_file in names.items() if not is_file):
            (target / name).mkdir(parents=True, exist_ok=True)
        files = [name for name, is_file in names.items() if is_file and not _is_own(name)]
        sums = self._listed_sums([name for name, is_file in names.items() if is_file and _base(name).startswith(_LIST)])
        _transfers.on_threads(lambda name: self.fetch(name, target / name, sums.get(name, ())), files)

    def _listed_sums(self, lists: list[str]) -> dict[str, set[str]]:
        """Read the checksums of uploaded files from the files that list them.

        Args:
            lists: Paths of the files that list checksums.

        Returns:
            The checksums by file path. A file that was uploaded several times has several checksums.
        """
        checksums: dict[str, set[str]] = {}
        for path, content in _transfers.on_threads(self.read, lists).items():
            try:
                listed = json.loads(content)
            except (ValueError, RecursionError):
                listed = None
            if not isinstance(listed, dict) or not all(isinstance(each, str) for each in listed.values()):
                damage = ValueError("it is not a list of checksums")
                raise _retrying.storage_error(f"read `{self / path}`", damage, "Delete it, if you trust the rest.")
            for name, checksum in listed.items():
                checksums.setdefault(_joined(path.rpartition("/")[0], name), set()).add(checksum)
        return checksums

    # ------------------------------------------------------------------------------------------------ files

    def fetch(self, name: str, target: Path, checksums: Collection[str] = ()) -> None:
        with _transfers.placing(target) as file:
            (self / name)._fetch(file, checksums)

    def has(self, name: str) -> bool:
        return (self / name)._is_a("File")

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile(prefix="raysgd-") as file:
            (self / name)._fetch(file)
            file.seek(0)
            yield file

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for writing.

        The data is first written to a local temporary file, which is uploaded at the end of the `with` block. If the
        upload fails, it can be repeated from this file.
        """
        with tempfile.TemporaryFile(prefix="raysgd-") as file:
            yield file
            self._list({name: (self / name)._send(file)})

    def remove(self, name: str) -> None:
        file = self / name
        file._delete(file.filesystem.delete_file, file.path)

    # ------------------------------------------------------------------------------------------------ commits

    def staged(self, name: str) -> StoreFolder:
        return replace(self / check_single(name), is_staged=True)

    def commit(self, name: str) -> StoreFolder:
        whole = self / check_single(name)
        if not self.has(_MARKER + name):
            if not whole.exists():
                raise whole._missing()
            self.write(_MARKER + name, _CONTENT)
        return whole

    def committed(self) -> list[str]:
        children = self._children()
        return sorted(name for name, is_file in children.items() if not is_file and _MARKER + name in children)

    def discard_staged(self, prefix: str) -> None:
        children = self._children()
        for name, is_file in children.items():
            if not is_file and name.startswith(prefix) and _MARKER + name not in children:
                (self / name).delete()

    # ------------------------------------------------------------------------------------------------ questions

    def _ask(self, doing: str, attempt: Callable[[], T], reads: bool = False) -> T:
        """Perform an operation on the store. Retry temporary failures, and convert errors to a `StorageError`.

        A `ModuleNotFoundError` is not converted.

        Args:
            doing: Description of the operation for messages, such as "read `s3://bucket/file`".
            attempt: Function that performs the operation once.
            reads: True if the operation reads a file. A `FileNotFoundError` is then raised unchanged.
        """
        try:
            return _retrying.retried(attempt, doing, self.patience_s)
        except Exception as error:  # stores may raise any exception
            if isinstance(error, ModuleNotFoundError) or (reads and isinstance(error, FileNotFoundError)):
                raise
            advice = (
                f"Failures that may pass were tried again for {self.patience_s:g} s ({_retrying.TIMEOUT_VARIABLE}). "
                "Check the address, your credentials and the network, or use another place."
            )
            raise _retrying.storage_error(doing, error, advice) from _retrying.cause_of(error)

    def _is_a(self, kind: str) -> bool:
        """Return True if `path` exists in the store and is of the given kind, "File" or "Directory"."""
        [info] = self._ask(f"look at `{self}`", partial(self.filesystem.get_file_info, [self.path]))
        return bool(info.type == getattr(_filesystems.pyarrow_fs().FileType, kind))

    def _send(self, file: IO[bytes]) -> str:
        """Upload a local file to the path of this object, and return the checksum of the content.

        If unfinished files are visible in the store, upload the file under a temporary name, and then rename it.
        """
        filesystem = self.filesystem
        send = _transfers.send if _filesystems.is_whole_at_close(filesystem) else _transfers.send_and_rename
        return self._ask(f"write `{self}`", partial(send, filesystem, file, self.path))

    def _fetch(self, target: IO[bytes], checksums: Collection[str] = ()) -> None:
        """Download this file.

        Args:
            target: Local file to write the content to.
            checksums: Valid checksums of the file. Empty to not check the content.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        attempt = partial(_transfers.fetch, self.filesystem, self.path, target, checksums)
        try:
            self._ask(f"read `{self}`", attempt, reads=True)
        except FileNotFoundError as error:
            raise self._missing() from _retrying.cause_of(error)

    def _everything(self) -> dict[str, bool]:
        """List everything in the folder and its subfolders.

        Returns:
            A dict from paths, relative to this folder, to True for a file or False for a folder.

        Raises:
            FileNotFoundError: The folder does not exist.
            StorageError: The store lists a path that is not inside the folder.
        """
        listing = dict(self._listed(recursive=True))
        outside = [name for name in listing if not lies_inside(name)]
        if outside:
            raise StorageError(
                f"could not read `{self}`: the store lists the entry {outside[0]!r}, which cannot be inside a folder. "
                "Remove this entry from the store, if you trust the rest."
            )
        if not listing and not self.exists():
            raise self._missing()
        return listing

    def _children(self) -> dict[str, bool]:
        """List the files and folders directly in this folder.

        Returns:
            A dict from names to True for a file or False for a folder. Empty if this folder does not exist.
        """
        if _filesystems.lists_folders(self.filesystem):
            return {name: is_file for name, is_file in self._listed(recursive=False) if lies_inside(name)}
        inside = [each for each in self._listed(recursive=True) if lies_inside(each[0])]
        folders = {name.partition("/")[0] for name, is_file in inside if "/" in name or not is_file}
        files = {name for name, is_file in inside if "/" not in name and is_file}
        return {**dict.fromkeys(files, True), **dict.fromkeys(folders, False)}

    def _listed(self, recursive: bool) -> list[tuple[str, bool]]:
        path = self.path
        chosen = _filesystems.pyarrow_fs().FileSelector(path, recursive=recursive, allow_not_found=True)
        infos = self._ask(f"list `{self}`", partial(self.filesystem.get_file_info, chosen))
        top = path.strip("/")
        paths = [(info.path.removeprefix("/").removesuffix("/"), info.is_file) for info in infos]
        return [(_from(top, path), is_file) for path, is_file in paths if path != top]

    def _missing(self) -> FileNotFoundError:
        """Return the error to raise if this file or folder does not exist."""
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def _delete(self, delete: Callable[[str], object], path: str) -> None:
        """Delete a file or folder if it exists.

        Args:
            delete: Function that deletes it.
            path: Path in the file system.
        """

        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError):
                delete(path)

        self._ask(f"delete `{self}`", attempt)


def _from(top: str, path: str) -> str:
    """Return a path relative to the folder `top`. If the path is outside this folder, the result begins with `..`."""
    return path.removeprefix(f"{top}/") if not top or path.startswith(f"{top}/") else f"../{path}"


def _joined(*parts: str) -> str:
    """Join those parts of a path that are not empty."""
    return "/".join(part for part in parts if part)


def _is_own(name: str) -> bool:
    return _base(name).startswith((_MARKER, _transfers.TEMPORARY))


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def open_folder(path: str | os.PathLike[str], filesystem: Any = None, *, argument: str = "path") -> Folder:
    """Return the `Folder` for a path or URI, without connecting to a store. The folder need not exist.

    Args:
        path: A path on disk (`~` is your home folder), or a URI such as `s3://bucket/results`, `gs://...`,
            `abfs://...`, `file://...`, or a URI of any other file system that fsspec supports.
        filesystem: A PyArrow or fsspec file system. `path` is then a path in this file system, such as
            `bucket/results`.
        argument: Name of the `path` argument in error messages.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `path` is empty, or is a URI that cannot be used, for example because its scheme is unknown or
            because `filesystem` was passed too.
        ModuleNotFoundError: The file system needs a package that is not installed.
    """
    text = _uris.checked_text(argument, path)
    if filesystem is not None:
        return _in(filesystem, text, argument)
    if "::" in text and "://" in text:
        raise ValueError(
            f"`{argument}={masked(text)!r}`: to chain file systems, pass an fsspec file system as `filesystem=`."
        )
    if _uris.is_local(text):
        return Folder(_uris.local_path_of(argument, text))
    _filesystems.check(argument, text)
    return StoreFolder(text, patience_s=_retrying.limit_s())


def make_new(parent: Folder, name: str) -> Folder:
    """Create a new folder with a unique name, and return it. Several programs can call this at the same time.

    Args:
        parent: Folder in which to create the new folder.
        name: Name of the new folder. On disk, a number is appended if there is a folder of this name. In a store,
            random characters are always appended, because two programs could otherwise create the same folder.

    Raises:
        OSError: The folder could not be created. In a store, this is a `StorageError`.
    """
    if not parent.is_local:
        folder = parent / f"{name}_{secrets.token_hex(4)}"
        folder.make()
        return folder
    parent.make()
    folders = (parent / (f"{name}_{number}" if number else name) for number in itertools.count())
    return next(each for each in folders if _is_new(each))


def _is_new(folder: Folder) -> bool:
    """Create a folder on disk. Return False if there is a folder or a file of this name."""
    with _retrying.telling(f"make the folder `{folder}`", ADVICE), contextlib.suppress(FileExistsError):
        folder.local_path.mkdir()
        return True
    return False


def _in(filesystem: Any, text: str, argument: str) -> Folder:
    """Return a folder in a file system object that the user passed.

    Args:
        filesystem: The file system.
        text: Path of the folder in the file system.
        argument: Name of the user's argument for the path, for error messages.
    """
    if _uris.scheme_of(text) is not None:
        raise ValueError(
            f"`{argument}={masked(text)!r}`: with `filesystem=`, pass a path inside it, such as 'bucket/results', "
            "not a URI."
        )
    if _is_of(filesystem, "pyarrow.fs", "LocalFileSystem") or _is_of(
        filesystem, "fsspec.implementations.local", "LocalFileSystem"
    ):
        return Folder(_uris.local_path_of(argument, text))
    if _is_of(filesystem, "fsspec", "AbstractFileSystem"):
        filesystem = _filesystems.wrapped(filesystem)
    elif not _is_of(filesystem, "pyarrow.fs", "FileSystem"):
        raise TypeError(f"`filesystem={masked(filesystem)!r}`: need a file system of PyArrow or fsspec, or None.")
    base = text.rstrip("/")
    scheme = str(filesystem.type_name).removeprefix("py::").removeprefix("fsspec+")
    uri = f"{scheme}://{base.lstrip('/')}"
    return StoreFolder(uri, filesystem, base, _retrying.limit_s())


def _is_of(value: Any, module: str, name: str) -> bool:
    """Return True if a value is an instance of the class `module.name`, without importing the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
