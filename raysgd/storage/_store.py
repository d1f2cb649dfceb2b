"""Folders in a store. A folder becomes whole by a marker that is written last.

The marker of `name` is a file `.complete-name` beside it: so one listing tells which folders are whole, and what is in
a folder is only what users put there. Nothing is staged elsewhere, because stores copy where disks rename.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from raysgd._optional import require
from raysgd.storage import _filesystems, _transfers, _trees
from raysgd.storage._filesystems import Opened
from raysgd.storage._retrying import TIMEOUT_VARIABLE, Patience, storage_error
from raysgd.storage._uris import child_of, masked
from raysgd.storage.folder import Folder, check_name, check_single

T = TypeVar("T")

_MARKER = ".complete-"
_CONTENT = b"The folder beside this file, of the same name, is complete.\n"


@dataclass(frozen=True)
class Store:
    """A place in a store.

    Attributes:
        uri: Where it is.
        given: The file system that the user made; None for that of `uri`.
        base: The path in `given`.
        patience: For how long failures are tried again.
    """

    uri: str
    given: Any = None
    base: str = ""
    patience: Patience = field(default_factory=Patience)

    def opened(self) -> Opened:
        """The file system, and the path in it."""
        return Opened(self.given, self.base) if self.given is not None else _filesystems.opened(self.uri)


@dataclass(frozen=True, eq=False, repr=False)
class StoreFolder(Folder):
    """A folder in a store.

    Attributes:
        store: The place that it was opened at.
        inside: The path from there.
    """

    store: Store
    inside: str = ""

    @property
    def uri(self) -> str:
        return child_of(self.store.uri, self.inside)

    @property
    def path(self) -> str:
        return _joined(self._opened.base, self.inside)

    @property
    def filesystem(self) -> Any:
        return self._opened.filesystem

    @property
    def is_local(self) -> bool:
        return False

    @property
    def is_in_memory(self) -> bool:
        return self.store.uri.startswith("memory:")

    @property
    def local_path(self) -> Path:
        raise ValueError(f"`{self}` is not on a disk of this machine: use `download`.")

    @property
    def name(self) -> str:
        return self.uri.partition("?")[0].rstrip("/").rpartition("/")[2]

    def __truediv__(self, name: str) -> StoreFolder:
        return StoreFolder(self.store, _joined(self.inside, check_name(name)))

    def __str__(self) -> str:
        return masked(self.uri)

    @property
    def _opened(self) -> Opened:
        return self._ask(f"open `{self}`", self.store.opened)

    # ------------------------------------------------------------------------------------------------ folders

    def make(self) -> None:
        fs, path = self.filesystem, self.path
        self._ask(f"make the folder `{self}`", partial(fs.create_dir, path, recursive=True))

    def exists(self) -> bool:
        return self._is_a("Directory")

    def names(self) -> list[str]:
        return sorted(name for name, _ in self._children() if not name.startswith((_MARKER, _trees.TEMPORARY)))

    def delete(self) -> None:
        above, _, name = self.path.rpartition("/")
        if above:
            self._delete(self.filesystem.delete_file, f"{above}/{_MARKER}{name}")
        if self.exists():  # where it does not, not every file system says so in a way that can be told from failures
            self._delete(self.filesystem.delete_dir, self.path)

    def upload(self, source: Path) -> None:
        tree = _tree_of(source, f"copy `{source}` to `{self}`")
        _transfers.on_threads(lambda name: (self / name).make(), tree.empty)
        _transfers.on_threads(lambda name: self._upload_file(source / name, name), tree.files)

    def _upload_file(self, source: Path, name: str) -> None:
        with open(source, "rb") as file:
            self._put(partial(_transfers.pieces, file), name)

    def download(self, target: Path) -> None:
        names = dict(map(self._inside_of, self._listed(recursive=True, must_exist=True)))
        target.mkdir(parents=True, exist_ok=True)
        for name in (name for name, is_file in names.items() if not is_file):
            (target / name).mkdir(parents=True, exist_ok=True)
        files = [name for name, is_file in names.items() if is_file and not _is_own(name)]
        _transfers.on_threads(lambda name: self.fetch(name, target / name), files)

    def fetch(self, name: str, target: Path) -> None:
        with _trees.placing(target) as file:
            self._get(name, file)

    # ------------------------------------------------------------------------------------------------ files

    def has(self, name: str) -> bool:
        return (self / name)._is_a("File")

    def read(self, name: str) -> bytes:
        content = io.BytesIO()
        self._get(name, content)
        return content.getvalue()

    def write(self, name: str, data: bytes) -> None:
        self._put(lambda: iter([data]), name)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile(prefix="raysgd-") as file:
            self._get(name, file)
            file.seek(0)
            yield file

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file of this machine, which is sent when the block ends; so sending it can be tried again."""
        check_name(name)
        with tempfile.TemporaryFile(prefix="raysgd-") as file:
            yield file
            self._put(partial(_transfers.in_one_piece, file), name)

    def append(self, name: str, data: bytes) -> None:
        try:
            before = self.read(name)
        except FileNotFoundError:
            before = b""
        self.write(name, before + data)

    def remove(self, name: str) -> None:
        file = self / name
        file._delete(file.filesystem.delete_file, file.path)

    # ------------------------------------------------------------------------------------------------ commits

    def staged(self, name: str) -> StoreFolder:
        return self / check_single(name)

    def commit(self, name: str) -> StoreFolder:
        whole = self / check_single(name)
        if not self.has(_MARKER + name):
            if not whole.exists():
                raise _missing(whole)
            self.write(_MARKER + name, _CONTENT)
        return whole

    def committed(self) -> list[str]:
        children = dict(self._children())
        return sorted(name for name, is_file in children.items() if not is_file and _MARKER + name in children)

    def discard_staged(self, prefix: str) -> None:
        children = dict(self._children())
        for name, is_file in children.items():
            if not is_file and name.startswith(prefix) and _MARKER + name not in children:
                (self / name).delete()

    # ------------------------------------------------------------------------------------------------ inside

    def _inner(self, name: str) -> str:
        return _joined(self.path, check_name(name))

    def _ask(self, doing: str, attempt: Callable[[], T], reads: bool = False) -> T:
        """What the store answers, tried again where that helps; its errors in our words."""
        try:
            return self.store.patience.call(attempt, doing)
        except ModuleNotFoundError:
            raise
        except FileNotFoundError as error:
            if reads:
                raise
            raise storage_error(doing, error, self._advice) from error
        except Exception as error:
            raise storage_error(doing, error, self._advice) from error

    @property
    def _advice(self) -> str:
        return (
            f"Failures that may pass were tried again for {self.store.patience.total_s:g} s ({TIMEOUT_VARIABLE}). "
            "Check the address, your credentials and the network, or use another place."
        )

    def _put(self, pieces: _transfers.Pieces, name: str) -> None:
        """Sends a file: under its name at once where the store shows a file when it is closed."""
        fs, path = self.filesystem, self._inner(name)
        send = _transfers.send if self._opened.is_whole_at_close else _transfers.send_and_rename
        self._ask(f"write `{self / name}`", partial(send, fs, pieces, path))

    def _get(self, name: str, target: IO[bytes]) -> None:
        fs, path = self.filesystem, self._inner(name)
        try:
            self._ask(f"read `{self / name}`", partial(_transfers.fetch, fs, path, target), reads=True)
        except FileNotFoundError as error:
            raise _missing(self / name) from error

    def _delete(self, delete: Callable[[str], object], path: str) -> None:
        self._ask(f"delete `{self}`", partial(_unless_missing, delete, path))

    def _is_a(self, kind: str) -> bool:
        fs, path = self.filesystem, self.path
        [info] = self._ask(f"look at `{self}`", partial(fs.get_file_info, [path]))
        return bool(info.type == getattr(_fs().FileType, kind))

    def _children(self) -> list[tuple[str, bool]]:
        """The names directly in it, and whether they are files."""
        if self._opened.lists_folders:
            return [(info.base_name, info.is_file) for info in self._listed(recursive=False, must_exist=False)]
        inside = [self._inside_of(info) for info in self._listed(recursive=True, must_exist=False)]
        folders = {name.partition("/")[0] for name, is_file in inside if "/" in name or not is_file}
        files = {name for name, is_file in inside if "/" not in name and is_file}
        return [*((name, False) for name in folders), *((name, True) for name in files - folders)]

    def _inside_of(self, info: Any) -> tuple[str, bool]:
        """The path of something listed from here on, and whether it is a file."""
        return info.path.strip("/").removeprefix(self.path.strip("/") + "/"), info.is_file

    def _listed(self, recursive: bool, must_exist: bool) -> list[Any]:
        fs = self.filesystem
        chosen = _fs().FileSelector(self.path, recursive=recursive, allow_not_found=True)
        found: list[Any] = self._ask(f"list `{self}`", partial(fs.get_file_info, chosen))
        if must_exist and not found and not self.exists():
            raise _missing(self)
        return found


def _fs() -> Any:
    return require("pyarrow.fs", "storage", "storage other than a local disk")


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _is_own(name: str) -> bool:
    return name.rpartition("/")[2].startswith((_MARKER, _trees.TEMPORARY))


def _tree_of(source: Path, doing: str) -> _trees.Tree:
    try:
        return _trees.Tree.of(source)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(doing, error, "Copy only files and folders that this process can read.") from error


def _missing(folder: Folder) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


def _unless_missing(delete: Callable[[str], object], path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        delete(path)
