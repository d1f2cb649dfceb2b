"""Files and folders in a store: single questions, asked again where that helps, and errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any, TypeVar

from raysgd._imports.optional import require
from raysgd._text.secrets import masked
from raysgd.exceptions import StorageError
from raysgd.storage import _filesystems, _transfers
from raysgd.storage._filesystems import OpenedLocation
from raysgd.storage._retrying import TIMEOUT_VARIABLE, RetryLimit, cause_of, storage_error
from raysgd.storage._uris import child_of
from raysgd.storage.folder import check_name, lies_inside

T = TypeVar("T")


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
    patience: RetryLimit = field(default_factory=RetryLimit)

    def entry(self, inside: str) -> Entry:
        """Return what is at a path in it."""
        opened = self.ask(f"open `{masked(child_of(self.uri, inside))}`", self._opened)
        return Entry(self, opened, joined(opened.base, inside), inside)

    def _opened(self) -> OpenedLocation:
        if self.given is not None:
            return OpenedLocation(self.given, self.base)
        return _filesystems.opened(self.uri, self.patience.total_s)

    def ask(self, doing: str, attempt: Callable[[], T], reads: bool = False) -> T:
        """Return what the store answers, tried again where that helps; its errors in our words."""
        try:
            return self.patience.call(attempt, doing)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) or (reads and isinstance(error, FileNotFoundError)):
                raise
            raise storage_error(doing, error, self._advice) from cause_of(error)

    @property
    def _advice(self) -> str:
        return (
            f"Failures that may pass were tried again for {self.patience.total_s:g} s ({TIMEOUT_VARIABLE}). "
            "Check the address, your credentials and the network, or use another place."
        )


@dataclass(frozen=True)
class Entry:
    """A file or a folder, whether or not it exists.

    Attributes:
        store: Where it is.
        opened: The file system.
        path: The path in it.
        inside: The path from the place in the store.
    """

    store: Store
    opened: OpenedLocation
    path: str
    inside: str

    @property
    def shown(self) -> str:
        """What errors call it."""
        return masked(child_of(self.store.uri, self.inside))

    def child(self, name: str) -> Entry:
        """A file or folder in this folder."""
        return replace(self, path=joined(self.path, check_name(name)), inside=joined(self.inside, name))

    def make(self) -> None:
        """Makes the folder and those above it."""
        self.store.ask(f"make the folder `{self.shown}`", partial(self.opened.make, self.path))

    def is_a(self, kind: str) -> bool:
        """Return whether there is one of this kind, "File" or "Directory"."""
        attempt = partial(self.opened.filesystem.get_file_info, [self.path])
        [info] = self.store.ask(f"look at `{self.shown}`", attempt)
        return bool(info.type == getattr(_fs().FileType, kind))

    def send(self, pieces: _transfers.Pieces) -> None:
        """Sends a file: under its name at once where the store shows a file when it is closed."""
        send = _transfers.send if self.opened.is_whole_at_close else _transfers.send_and_rename
        self.store.ask(f"write `{self.shown}`", partial(send, self.opened.filesystem, pieces, self.path))

    def fetch(self, target: IO[bytes], checksums: Collection[str] = ()) -> None:
        """Fetches a file. Checksums: those that it may have, as far as they are known.

        Raises:
            FileNotFoundError: There is none.
        """
        attempt = partial(_transfers.fetch, self.opened.filesystem, self.path, target, checksums)
        try:
            self.store.ask(f"read `{self.shown}`", attempt, reads=True)
        except FileNotFoundError as error:
            raise self.missing() from cause_of(error)

    def everything(self) -> dict[str, bool]:
        """The paths of all that is in the folder, from there, and whether each is a file.

        Raises:
            FileNotFoundError: There is no such folder.
            StorageError: The store names something that is not inside of it.
        """
        found = dict(self._listed(recursive=True))
        outside = [name for name in found if not lies_inside(name)]
        if outside:
            raise StorageError(
                f"could not read `{self.shown}`: the store says that {outside[0]!r} is in it, which no folder can "
                "have. Remove it there, if you trust the rest."
            )
        if not found and not self.is_a("Directory"):
            raise self.missing()
        return found

    def children(self) -> dict[str, bool]:
        """The names directly in the folder, and whether each is a file; none where it does not exist."""
        if self.opened.lists_folders:
            return {name: is_file for name, is_file in self._listed(recursive=False) if lies_inside(name)}
        inside = [each for each in self._listed(recursive=True) if lies_inside(each[0])]
        folders = {name.partition("/")[0] for name, is_file in inside if "/" in name or not is_file}
        files = {name for name, is_file in inside if "/" not in name and is_file}
        return {**dict.fromkeys(files, True), **dict.fromkeys(folders, False)}

    def _listed(self, recursive: bool) -> list[tuple[str, bool]]:
        chosen = _fs().FileSelector(self.path, recursive=recursive, allow_not_found=True)
        infos = self.store.ask(f"list `{self.shown}`", partial(self.opened.filesystem.get_file_info, chosen))
        top = self.path.strip("/")
        found = [(info.path.removeprefix("/").removesuffix("/"), info.is_file) for info in infos]
        return [(_from(top, path), is_file) for path, is_file in found if path != top]

    def missing(self) -> FileNotFoundError:
        """Return what to raise where it does not exist."""
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.shown)

    def delete_file(self) -> None:
        """Deletes the file, if it is there."""
        self._delete(self.opened.filesystem.delete_file)

    def delete_folder(self) -> None:
        """Deletes the folder with everything in it, if it is there."""
        if self.is_a("Directory"):  # where it does not exist, not every store says so in a way that can be told
            self._delete(self.opened.filesystem.delete_dir)

    def _delete(self, delete: Callable[[str], object]) -> None:
        self.store.ask(f"delete `{self.shown}`", partial(_unless_missing, delete, self.path))


def _from(top: str, path: str) -> str:
    """The path from a folder; a name that lies in no folder, if it is not inside of this one."""
    return path.removeprefix(f"{top}/") if not top or path.startswith(f"{top}/") else f"../{path}"


def joined(*parts: str) -> str:
    """Parts of a path as one; empty ones are left out."""
    return "/".join(part for part in parts if part)


def _fs() -> Any:
    return require("pyarrow.fs", "storage", "storage other than a local disk")


def _unless_missing(delete: Callable[[str], object], path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        delete(path)
