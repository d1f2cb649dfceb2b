"""Files as shards: found by name, pattern or folder, on a disk or in a store."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, TypeAlias

from raysgd.storage import Folder, open_folder
from raysgd.storage._transfers import on_threads
from raysgd.storage._uris import checked_text, child_of, divided, is_local
from raysgd.streams.stream import Shard, Stream

_NUM_BYTES = 4096
_NUM_DIGESTS = 64

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"


class StreamFile(NamedTuple):
    """One file.

    Attributes:
        folder: What it is in.
        name: Its name there.
    """

    folder: Folder
    name: str

    @property
    def shard(self) -> str:
        """Its name as a shard: where it is, without keys."""
        return str(self.folder / self.name)

    @property
    def path(self) -> str:
        """Its path in the file system of the folder."""
        return f"{self.folder.path}/{self.name}"

    def version(self, has_digest: bool) -> str:
        """Return what changes with its content: its size, if it is on a disk, or with a digest of both of its ends."""
        try:
            if not has_digest:
                return str(os.path.getsize(self.path)) if self.folder.is_local else ""
            store = None if self.folder.is_local else self.folder.filesystem
            with open(self.path, "rb") if store is None else store.open_input_file(self.path) as content:
                begin, size = content.read(_NUM_BYTES), content.seek(0, os.SEEK_END)
                content.seek(max(0, size - _NUM_BYTES))
                return f"{size} {blake2b(begin + content.read(_NUM_BYTES), digest_size=8).hexdigest()}"
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            return ""  # an error where it is read


class FileStream(Stream):
    """Rows of files, each of which is a shard. The order is that of the names in each of the paths.

    Args:
        paths: A file, a folder whose files with a fitting ending are read, or a pattern for the last part of a path, as
            in `"s3://bucket/data/part-*.parquet"`; or several of these.
        filesystem: What the paths are in, as for `raysgd.storage.open_folder`.

    Raises:
        TypeError: `paths` are no paths.
        ValueError: There is none.
    """

    endings: ClassVar[tuple[str, ...]]

    def __init__(self, paths: Paths, filesystem: Any = None) -> None:
        several = [paths] if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable) else paths
        self._paths = [checked_text("paths", path) for path in several]
        self._filesystem = filesystem
        if not self._paths:
            raise ValueError("`paths=[]`: need at least one file, folder or pattern.")

    @cached_property
    def files(self) -> list[StreamFile]:
        """The files, looked for once.

        Raises:
            FileNotFoundError: A path leads to no file.
        """
        return [file for path in self._paths for file in self._found(path)]

    @cached_property
    def versions(self) -> list[str]:
        """The version of each file, with a digest for up to 64 files that are far from each other."""
        chosen = {file.shard for file in self.files[:: -(-len(self.files) // _NUM_DIGESTS)]}
        found = on_threads(lambda name: self._by_shard[name].version(name in chosen), self._by_shard)
        return [found[file.shard] for file in self.files]

    def shards(self) -> Sequence[Shard]:
        return [Shard(file.shard, None, version) for file, version in zip(self.files, self.versions, strict=True)]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        return self.open_some(shard, start, lambda number: True)

    def open_some(self, shard: str, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        return self._rows(self._by_shard[shard], start, is_needed)

    @abstractmethod
    def _rows(self, file: StreamFile, start: int, is_needed: Callable[[int], bool]) -> Iterator[Any]:
        """The rows of a file from one on; anything in the place of those that are not needed."""

    @cached_property
    def _by_shard(self) -> dict[str, StreamFile]:
        return {file.shard: file for file in self.files}

    def _found(self, path: str) -> list[StreamFile]:
        parent, name = _divided(path)
        is_pattern = any(each in name for each in "*?[")
        if not is_pattern and name.endswith(self.endings) and not os.path.isdir(path):  # such as Spark's `x.parquet/`
            return [StreamFile(open_folder(parent, self._filesystem, argument="paths"), name)]
        if not is_pattern and is_local(path) and os.path.isfile(path):
            known = " or ".join(map(repr, self.endings))
            raise ValueError(f"`paths={path!r}`: a `{type(self).__name__}` reads files that end with {known}.")
        folder = open_folder(parent if is_pattern else path, self._filesystem, argument="paths")
        names = [
            each for each in folder.names() if (fnmatchcase(each, name) if is_pattern else each.endswith(self.endings))
        ]
        if not names:
            what = f"that fits {name!r}" if is_pattern else f"that ends with {' or '.join(self.endings)}"
            raise FileNotFoundError(f"`paths`: {folder} has no file {what}.")
        return [StreamFile(folder, each) for each in names]


def _divided(path: str) -> tuple[str, str]:
    """Returns what a path is in, and its last part, which is empty for a path that ends with a slash."""
    if is_local(path):
        parent, slash, name = path.rpartition("/")
        return parent or slash or ".", name
    store, inside, query = divided(path)
    parent, _, name = inside.rpartition("/")
    return child_of(store + query, parent), "" if path.removesuffix(query).endswith("/") else name
