"""The content of a checkpoint: a dict, a folder or an object reference. Each can be read as a dict or as files.

* A dict is written to a folder as one file, `dict_checkpoint.pkl`. When the folder is read as a dict, its other entries
  are added to the dict as tar archives.
* A folder without `dict_checkpoint.pkl` is read as a dict with one tar archive of its files. The exceptions are files
  named `KEY.meta.pkl`, whose unpickled content is stored under `KEY`.

Unpickling may run code: read checkpoints only from sources that you trust. When a dict is written to a folder, nothing
is written outside this folder, whatever the dict's keys and archives contain.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from raysgd.exceptions import CheckpointCorruptedError

if TYPE_CHECKING:
    from raysgd.storage import Folder


TEMPORARY_PREFIX = "checkpoint_tmp_"
DICT_FILE = "dict_checkpoint.pkl"
METADATA_FILE = ".metadata.json"
META_SUFFIX = ".meta.pkl"
FOLDER_KEY = "fs_checkpoint"
EXTRA_FILES_KEY = "_ray_additional_checkpoint_files"


class DictContent:
    """The content of a checkpoint that is a dict, in memory or in Ray's object store.

    Args:
        data: The dict, or a `ray.ObjectRef` to a dict in Ray's object store, which is fetched each time it is needed.
        metadata: The checkpoint's metadata, which users set with `Checkpoint.set_metadata`.
    """

    def __init__(self, data: Any, metadata: Mapping[str, Any] | None = None) -> None:
        self._data = dict(data) if isinstance(data, Mapping) else data
        self._metadata = dict(metadata or {})

    @property
    def is_stored(self) -> bool:
        """True if the dict is in Ray's object store."""
        return not isinstance(self._data, dict)

    @property
    def representation(self) -> tuple[str, Any]:
        """A pair: the name that Ray AIR 2.0 gives this type of content, and the dict or object reference."""
        return "object_ref" if self.is_stored else "data_dict", self._data

    def as_dict(self) -> dict[str, Any]:
        """Return the checkpoint's content as a dict."""
        data: Any = self._data
        if self.is_stored:
            import ray

            data = ray.get(data)
            if not isinstance(data, Mapping):
                raise CheckpointCorruptedError(f"The object reference leads to {data!r:.200}: need a dict.")
        return dict(data)

    def write_to(self, target: Path) -> None:
        """Write the checkpoint's content and metadata into an existing folder."""
        write_dict(self.as_dict(), target)
        (target / METADATA_FILE).unlink(missing_ok=True)
        if self._metadata:
            (target / METADATA_FILE).write_text(json.dumps(self._metadata), encoding="utf-8")

    def metadata(self) -> dict[str, Any]:
        """Return the metadata that the user has set for the checkpoint."""
        return dict(self._metadata)

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the checkpoint's metadata."""
        self._metadata = dict(metadata)

    def portable(self) -> DictContent:
        """Return this object, because a dict or an object reference can be pickled and read in another process."""
        return self


class FolderContent:
    """The content of a checkpoint that is a folder, on disk or in remote storage.

    Args:
        folder: Folder that holds the content.
        goes_by_place: True to pickle the folder's location instead of its files. If the folder was written from a
            dict, the dict is pickled as well, for machines that cannot access the folder.
    """

    def __init__(self, folder: Folder, goes_by_place: bool = False) -> None:
        self.folder, self._goes_by_place = folder, goes_by_place

    @property
    def representation(self) -> tuple[str, Any]:
        return ("local_path", self.folder.path) if self.folder.is_local else ("uri", self.folder.uri)

    def as_dict(self) -> dict[str, Any]:
        with self.on_disk() as folder:
            return folder_as_dict(folder)

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """Yield the path of the checkpoint's folder, or of a temporary copy if the folder is in remote storage."""
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

    def write_to(self, target: Path) -> None:
        if not (self.folder.is_local and self.folder.local_path.resolve() == target.resolve()):
            (target / METADATA_FILE).unlink(missing_ok=True)
            self.folder.download(target)

    def metadata(self) -> dict[str, Any]:
        if not self.folder.has(METADATA_FILE):
            return {}
        metadata = json.loads(self.folder.read(METADATA_FILE))
        if not isinstance(metadata, dict):
            raise CheckpointCorruptedError(f"{self.folder}: `{METADATA_FILE}` holds no dict, but {metadata!r:.200}.")
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.folder.write(METADATA_FILE, json.dumps(dict(metadata)).encode())

    def portable(self) -> Content:
        """Return content that can be pickled and read in another process.

        If the folder is on a local disk or in memory and `goes_by_place` is False, return the folder's content as a
        dict, because other processes may not be able to access the folder. Otherwise, return this object, which is
        pickled as the folder's location.
        """
        is_here_only = self.folder.is_local or self.folder.is_in_memory
        return self._copied() if is_here_only and not self._goes_by_place else self

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.folder, self._copied() if self._goes_by_place and self.folder.has(DICT_FILE) else None)

    def _copied(self) -> DictContent:
        return DictContent(self.as_dict(), self.metadata())


def _arrived(folder: Folder, copy: DictContent | None) -> Content:
    return FolderContent(folder) if copy is None or folder.exists() else copy


Content = DictContent | FolderContent
"""The type of a checkpoint's content."""


def folder_as_dict(folder: Path) -> dict[str, Any]:
    """Return a folder's checkpoint content as a dict, without the metadata.

    Raises:
        FileNotFoundError: The folder does not exist.
        CheckpointCorruptedError: `dict_checkpoint.pkl` does not contain a dict.
    """
    entries = sorted(entry for entry in folder.iterdir() if entry.name != METADATA_FILE)
    file = folder / DICT_FILE
    if not file.exists():
        kept = {entry.name.removesuffix(META_SUFFIX): _load(entry) for entry in entries if _is_meta(entry)}
        return {**kept, FOLDER_KEY: _packed(entry for entry in entries if not _is_meta(entry))}
    content = _load(file)
    if not isinstance(content, dict):
        raise CheckpointCorruptedError(f"{file} holds no dict, but {content!r:.200}: it is not a checkpoint.")
    extra = {entry.name: _packed([entry]) for entry in entries if entry != file}
    return {**content, EXTRA_FILES_KEY: extra} if extra else content


def write_dict(content: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint's dict into a folder as one file.

    If `folder_as_dict` created the dict from files, write the original files instead.

    Raises:
        CheckpointCorruptedError: A key or archive leads outside the folder, or an archive is invalid.
    """
    if FOLDER_KEY in content:
        for key, value in content.items():
            if key != FOLDER_KEY:
                _dump(value, _inside(folder, f"{key}{META_SUFFIX}"))
        _unpack(content[FOLDER_KEY], folder)
        return
    rest = dict(content)
    for archive in rest.pop(EXTRA_FILES_KEY, {}).values():
        _unpack(archive, folder)
    _dump(rest, folder / DICT_FILE)


def _is_meta(entry: Path) -> bool:
    return entry.name.endswith(META_SUFFIX) and entry.is_file()


def _inside(folder: Path, name: str) -> Path:
    """Return the path of the entry `name` in a folder.

    Raises:
        CheckpointCorruptedError: The name would lead outside the folder.
    """
    if len(PurePosixPath(name).parts) != 1 or name in (".", ".."):
        raise CheckpointCorruptedError(f"The checkpoint has the key {name!r}, which cannot be the name of a file.")
    return folder / name


def _packed(entries: Iterable[Path]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            archive.add(entry, arcname=entry.name)
    return stream.getvalue()


def _unpack(data: Any, folder: Path) -> None:
    """Unpack a tar archive into a folder. Reject device files, and paths and links that lead outside the folder."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, TypeError) as error:
        raise CheckpointCorruptedError(
            f"The checkpoint's archive cannot be unpacked into {folder}: {error}. Nothing outside this folder was "
            "written."
        ) from error


def _load(file: Path) -> Any:
    with open(file, "rb") as stream:
        return pickle.load(stream)


def _dump(value: Any, file: Path) -> None:
    import cloudpickle

    with open(file, "wb") as stream:
        cloudpickle.dump(value, stream, protocol=5)
