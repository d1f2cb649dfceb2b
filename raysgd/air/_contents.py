"""The contents of checkpoints: a dict, a folder, or an object reference; each can be read as a dict and as files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysgd.air._packing import DICT_FILE, METADATA_FILE, folder_as_dict, write_dict
from raysgd.exceptions import CheckpointCorruptedError

if TYPE_CHECKING:
    from raysgd.storage import Folder

TEMPORARY_PREFIX = "checkpoint_tmp_"


class DictContent:
    """A dict.

    Args:
        data: The dict.
        metadata: What was noted beside it.
    """

    def __init__(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        self._data = dict(data)
        self._metadata = dict(metadata or {})

    @property
    def representation(self) -> tuple[str, Any]:
        """The kind, in the words of the old library, and the data."""
        return "data_dict", self._data

    def as_dict(self) -> dict[str, Any]:
        """All of it, in memory."""
        return dict(self._data)

    def write(self, target: Path) -> None:
        """Writes all of it into a folder that is there."""
        write_dict(self._data, target)
        if self._metadata:
            (target / METADATA_FILE).write_text(json.dumps(self._metadata), encoding="utf-8")

    def metadata(self) -> dict[str, Any]:
        """Return what its user has noted beside it."""
        return dict(self._metadata)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Notes it, instead of what there was."""
        self._metadata = dict(metadata)

    def portable(self) -> DictContent:
        """Return what goes to another process, perhaps on another machine."""
        return self


class ObjectStoreContent(DictContent):
    """A dict that Ray's object store holds, fetched when it is first used.

    Args:
        reference: The `ray.ObjectRef`.
    """

    def __init__(self, reference: Any) -> None:
        super().__init__({})
        self._reference = reference

    @property
    def representation(self) -> tuple[str, Any]:
        return "object_ref", self._reference

    def as_dict(self) -> dict[str, Any]:
        import ray

        content = ray.get(self._reference)
        if not isinstance(content, Mapping):
            raise CheckpointCorruptedError(f"The object reference leads to {content!r:.200}: need a dict.")
        return dict(content)

    def write(self, target: Path) -> None:
        DictContent(self.as_dict(), self._metadata).write(target)


class FolderContent:
    """A folder, on a disk or in a remote storage.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    @property
    def representation(self) -> tuple[str, Any]:
        return ("local_path", self.folder.path) if self.folder.is_local else ("uri", self.folder.uri)

    def as_dict(self) -> dict[str, Any]:
        with self.on_disk() as folder:
            return folder_as_dict(folder)

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """The folder, or a copy of it for as long as the block lasts."""
        if self.folder.is_local:
            if not self.folder.exists():
                raise FileNotFoundError(
                    f"The checkpoint is in {self.folder}, which this machine does not have. Keep checkpoints in a "
                    "folder that all machines have mounted, or in a store such as `s3://bucket/folder`."
                )
            yield self.folder.local_path
            return
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as copy:
            self.folder.download(Path(copy))
            yield Path(copy)

    def write(self, target: Path) -> None:
        if not (self.folder.is_local and self.folder.local_path.resolve() == target.resolve()):
            self.folder.download(target)

    def metadata(self) -> dict[str, Any]:
        if not self.folder.has(METADATA_FILE):
            return {}
        found = json.loads(self.folder.read(METADATA_FILE))
        if not isinstance(found, dict):
            raise CheckpointCorruptedError(f"{self.folder}: `{METADATA_FILE}` holds no dict, but {found!r:.200}.")
        return found

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.folder.write(METADATA_FILE, json.dumps(dict(metadata)).encode())

    def portable(self) -> Content:
        """Returns it by value where only this machine can reach it, else as it is."""
        is_here_only = self.folder.is_local or self.folder.is_in_memory
        return self._copied() if is_here_only else self

    def _copied(self) -> DictContent:
        return DictContent(self.as_dict(), self.metadata())


class FolderReference(FolderContent):
    """A folder that goes to other processes by its place, not with its files.

    A dict in it goes along, for machines that do not see the folder.
    """

    def portable(self) -> Content:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.folder, self._copied() if self.folder.has(DICT_FILE) else None)


def _arrived(folder: Folder, copy: DictContent | None) -> Content:
    return FolderContent(folder) if copy is None or folder.exists() else copy


Content = DictContent | FolderContent
"""All of them: the others derive from these two."""
