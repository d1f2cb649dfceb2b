"""Folders in a store. A folder becomes whole by a marker that is written last.

The marker of `name` is a file `.complete-name` beside it: so one listing tells which folders are whole, and what is in
a folder is what users put there, beside lists of checksums with hidden names. Nothing is staged elsewhere, because
stores copy where disks rename.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from raysgd._text.secrets import masked
from raysgd.storage import _checksums, _transfers, _trees
from raysgd.storage._entries import Entry, Store, joined
from raysgd.storage._retrying import storage_error
from raysgd.storage._uris import child_of
from raysgd.storage.folder import Folder, check_name, check_single

_MARKER = ".complete-"
_CONTENT = b"The folder beside this file, of the same name, is complete.\n"


@dataclass(frozen=True, eq=False, repr=False)
class StoreFolder(Folder):
    """A folder in a store.

    Attributes:
        store: The place that it was opened at.
        inside: The path from there.
        is_staged: Whether it is one that is going to be committed, whose files stay as they are uploaded.
    """

    is_local = False

    store: Store
    inside: str = ""
    is_staged: bool = False

    @property
    def uri(self) -> str:
        return child_of(self.store.uri, self.inside)

    @property
    def path(self) -> str:
        return self._entry.path

    @property
    def filesystem(self) -> Any:
        return self._entry.opened.filesystem

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
        return replace(self, inside=joined(self.inside, check_name(name)))

    def without_retries(self) -> StoreFolder:
        return replace(self, store=replace(self.store, patience=replace(self.store.patience, total_s=0)))

    def __str__(self) -> str:
        return masked(self.uri)

    @property
    def _entry(self) -> Entry:
        return self.store.entry(self.inside)

    def make(self) -> None:
        self._entry.make()

    def exists(self) -> bool:
        return self._entry.is_a("Directory")

    def names(self) -> list[str]:
        return sorted(name for name in self._entry.children() if not name.startswith((_MARKER, _trees.TEMPORARY)))

    def delete(self) -> None:
        entry = self._entry
        above, _, name = entry.path.rpartition("/")
        if above:
            replace(entry, path=f"{above}/{_MARKER}{name}").delete_file()
        entry.delete_folder()

    def upload(self, source: Path, places: Mapping[str, str | None] | None = None) -> None:
        tree = _tree_of(source, f"copy `{source}` to `{self}`")
        placed = tree.placed(places)
        _transfers.on_threads(lambda name: (self / name).make(), tree.empty)
        sums = _transfers.on_threads(lambda name: self._upload_file(source / name, placed[name]), placed)
        if self.is_staged and sums:
            listed = _checksums.list_of({placed[name]: checksum for name, checksum in sums.items()})
            self.write(_checksums.new_list_name(), listed, sealed=True)

    def _upload_file(self, source: Path, name: str) -> str:
        """Sends a file; returns its checksum."""
        with open(source, "rb") as file:
            content = _checksums.SentContent(partial(_transfers.pieces, file))
            self._entry.child(name).send(content)
        return content.checksum

    def download(self, target: Path) -> None:
        names = self._entry.everything()
        target.mkdir(parents=True, exist_ok=True)
        for name in (name for name, is_file in names.items() if not is_file):
            (target / name).mkdir(parents=True, exist_ok=True)
        files = [name for name, is_file in names.items() if is_file and not _is_own(name)]
        sums = self._listed([name for name, is_file in names.items() if is_file and _checksums.is_list(name)])
        _transfers.on_threads(lambda name: self._fetch(name, target / name, sums.get(name, ())), files)

    def _listed(self, lists: list[str]) -> dict[str, set[str]]:
        """The checksums of each file by these lists: several, if it was uploaded more than once."""
        found: dict[str, set[str]] = {}
        for path, content in _transfers.on_threads(self.read, lists).items():
            try:
                listed = _checksums.listed_in(content)
            except OSError as error:
                raise storage_error(f"read `{self / path}`", error, "Delete it, if you trust the rest.") from error
            for name, checksum in listed.items():
                found.setdefault(joined(path.rpartition("/")[0], name), set()).add(checksum)
        return found

    def fetch(self, name: str, target: Path) -> None:
        self._fetch(name, target)

    def _fetch(self, name: str, target: Path, checksums: Collection[str] = ()) -> None:
        with _trees.placing(target) as file:
            self._entry.child(name).fetch(file, checksums)

    def has(self, name: str) -> bool:
        return self._entry.child(name).is_a("File")

    def read(self, name: str) -> bytes:
        content = io.BytesIO()
        self._entry.child(name).fetch(content)
        return content.getvalue()

    def write(self, name: str, data: bytes, *, sealed: bool = False) -> None:
        self._send(name, lambda: iter([data]), sealed)

    def _send(self, name: str, content: _transfers.Pieces, sealed: bool) -> None:
        self._entry.child(name).send(_checksums.SentContent(content, sealed=True) if sealed else content)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile(prefix="raysgd-") as file:
            self._entry.child(name).fetch(file)
            file.seek(0)
            yield file

    @contextlib.contextmanager
    def writing(self, name: str, *, sealed: bool = False) -> Iterator[IO[bytes]]:
        """Opens a file of this machine, which is sent when the block ends; so sending it can be tried again."""
        check_name(name)
        with tempfile.TemporaryFile(prefix="raysgd-") as file:
            yield file
            self._send(name, partial(_transfers.pieces, file), sealed)

    def append(self, name: str, data: bytes) -> None:
        try:
            before = self.read(name)
        except FileNotFoundError:
            before = b""
        self.write(name, before + data)

    def remove(self, name: str) -> None:
        self._entry.child(name).delete_file()

    def staged(self, name: str) -> StoreFolder:
        return replace(self / check_single(name), is_staged=True)

    def commit(self, name: str) -> StoreFolder:
        whole = self / check_single(name)
        if not self.has(_MARKER + name):
            if not whole.exists():
                raise whole._entry.missing()
            self.write(_MARKER + name, _CONTENT)
        return whole

    def committed(self) -> list[str]:
        children = self._entry.children()
        return sorted(name for name, is_file in children.items() if not is_file and _MARKER + name in children)

    def discard_staged(self, prefix: str) -> None:
        children = self._entry.children()
        for name, is_file in children.items():
            if not is_file and name.startswith(prefix) and _MARKER + name not in children:
                (self / name).delete()


def _is_own(name: str) -> bool:
    return name.rpartition("/")[2].startswith((_MARKER, _trees.TEMPORARY))


def _tree_of(source: Path, doing: str) -> _trees.FileTree:
    try:
        return _trees.FileTree.of(source)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(doing, error, "Copy only files and folders that this process can read.") from error
