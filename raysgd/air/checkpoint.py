"""`Checkpoint`: the saved state of a run, as a dict in memory or as a folder on disk or in remote storage.

Each can be read as a dict or as files:

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
import reprlib
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from raysgd.air.constants import MODEL_KEY, PREPROCESSOR_KEY
from raysgd.core.arguments import check_kind
from raysgd.core.text.secrets import masked
from raysgd.exceptions import CheckpointCorruptedError
from raysgd.storage import Folder, open_folder

if TYPE_CHECKING:
    import ray

__all__ = ["Checkpoint"]

CheckpointType = TypeVar("CheckpointType", bound="Checkpoint")
TEMPORARY_PREFIX = "checkpoint_tmp_"
DICT_FILE = "dict_checkpoint.pkl"
METADATA_FILE = ".metadata.json"
META_SUFFIX = ".meta.pkl"
FOLDER_KEY = "fs_checkpoint"
EXTRA_FILES_KEY = "_ray_additional_checkpoint_files"
_BYTES_KEY = "bytes_data"

_short = reprlib.Repr()
_short.maxdict = _short.maxlist = _short.maxtuple = 20
_short.maxstring = _short.maxother = 200


class Checkpoint:
    """The saved state of a run.

    Create a checkpoint from a dict, bytes, an object reference, a folder or a URI, and convert it to any of these.

    Examples:
        >>> checkpoint = Checkpoint.from_dict({"epoch": 3})
        >>> with checkpoint.as_directory() as folder:
        ...     Checkpoint.from_directory(folder).to_dict()
        {'epoch': 3}

    A checkpoint in a local folder is pickled with its content. A checkpoint in remote storage is pickled as its
    location only.

    Reading a checkpoint may run code that it contains: read only checkpoints that you trust.

    Args:
        path: A folder, a folder's URI, or a `raysgd.storage.Folder`.
        filesystem: The `pyarrow.fs.FileSystem` that contains `path`. Default: determined from `path`.
        local_path: A local folder.
        data_dict: A dict with the state.
        uri: A folder's URI.
        obj_ref: A reference to a dict in Ray's object store.

    Raises:
        ValueError: None of `path`, `local_path`, `data_dict`, `uri` and `obj_ref` was passed, or more than one.
    """

    def __init__(
        self,
        path: str | Path | Folder | None = None,
        filesystem: Any = None,
        *,
        local_path: str | Path | None = None,
        data_dict: Mapping[str, Any] | None = None,
        uri: str | None = None,
        obj_ref: ray.ObjectRef[Any] | None = None,
    ) -> None:
        sources = {"path": path, "local_path": local_path, "data_dict": data_dict, "uri": uri, "obj_ref": obj_ref}
        named = [name for name, value in sources.items() if value is not None]
        if len(named) != 1:
            raise ValueError(
                f"A checkpoint needs exactly one of {', '.join(f'`{name}`' for name in sources)}; given: "
                f"{', '.join(named) or 'none of them'}."
            )
        self._folder: Folder | None = None
        self._data: Any = obj_ref  # without a folder: the dict, or a reference to it, which is fetched when needed
        self._metadata: dict[str, Any] = {}
        self._goes_by_place = False
        if data_dict is not None:
            self._data = dict(_checked_dict(data_dict))
        elif obj_ref is None:
            place: Any = path or local_path or uri
            self._folder = place if isinstance(place, Folder) else open_folder(place, filesystem, argument=named[0])

    # -------------------------------------------------------------------------------------------------------- as a dict

    @classmethod
    def from_dict(cls: type[CheckpointType], data: Mapping[str, Any]) -> CheckpointType:
        """Create a checkpoint from a dict.

        Raises:
            RuntimeError: `data` is not a dict.
            ValueError: `data` is empty.
        """
        return cls(data_dict=_checked_dict(data))

    def to_dict(self) -> dict[str, Any]:
        """Return the content as a dict.

        If the checkpoint is a folder that was not written from a dict, return a dict with a tar archive of the folder
        under the key `fs_checkpoint`.
        """
        if self._folder is not None:
            with self.as_directory() as folder:
                return folder_as_dict(Path(folder))
        data = self._data
        if not isinstance(data, dict):
            import ray

            data = ray.get(data)
            if not isinstance(data, Mapping):
                raise CheckpointCorruptedError(f"The object reference leads to {data!r:.200}: need a dict.")
        return dict(data)

    @classmethod
    def from_bytes(cls: type[CheckpointType], data: bytes) -> CheckpointType:
        """Create a checkpoint from the result of `to_bytes`, or from another pickled value.

        If the value is not a dict, it is stored as `{"bytes_data": value}`.
        """
        content = pickle.loads(data)
        return cls(data_dict=content if isinstance(content, dict) else {_BYTES_KEY: content})

    def to_bytes(self) -> bytes:
        """Return the checkpoint's content as a pickle, which `from_bytes` reads."""
        import cloudpickle

        content = self.to_dict()
        return cloudpickle.dumps(content[_BYTES_KEY] if set(content) == {_BYTES_KEY} else content)

    @classmethod
    def from_object_ref(cls: type[CheckpointType], obj_ref: ray.ObjectRef[Any]) -> CheckpointType:
        """Create a checkpoint from a reference to a dict in Ray's object store."""
        return cls(obj_ref=obj_ref)

    def to_object_ref(self) -> ray.ObjectRef[Any]:
        """Store the checkpoint's content in Ray's object store and return the object reference."""
        if self._folder is None and not isinstance(self._data, dict):
            return self._data
        import ray

        return ray.put(self.to_dict())

    # ------------------------------------------------------------------------------------------------------ as a folder

    @classmethod
    def from_directory(cls: type[CheckpointType], path: str | Path) -> CheckpointType:
        """Create a checkpoint from a folder. The folder is not moved or copied.

        Raises:
            RuntimeError: The folder does not exist.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise RuntimeError(f"`path={masked(str(path))!r}` {what}: need the folder of a checkpoint.")
        return cls(path=folder)

    def to_directory(self, path: str | Path | None = None) -> str:
        """Write the checkpoint's content into a folder and return the folder's path.

        Args:
            path: The folder to write to. None to create a temporary folder, which you must delete yourself.
        """
        target = Path(path).expanduser() if path is not None else Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
        target.mkdir(parents=True, exist_ok=True)
        if self._folder is None:
            write_dict(self.to_dict(), target)
            (target / METADATA_FILE).unlink(missing_ok=True)
            if self._metadata:
                (target / METADATA_FILE).write_text(json.dumps(self._metadata), encoding="utf-8")
        elif not (self._folder.is_local and self._folder.local_path.resolve() == target.resolve()):
            (target / METADATA_FILE).unlink(missing_ok=True)
            self._folder.download(target)
        return str(target)

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the path of a local folder with the checkpoint's content.

        If the checkpoint is not a local folder, yield a temporary folder that is deleted after the block.
        """
        if self._folder is not None and self._folder.is_local:
            if not self._folder.exists():
                raise FileNotFoundError(
                    f"The checkpoint is in {self._folder}, which this machine does not have. Keep checkpoints in a "
                    "folder that all machines have mounted, or in a store such as `s3://bucket/folder`."
                )
            yield str(self._folder.local_path)
            return
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as copy:
            yield self.to_directory(copy)

    @classmethod
    def from_uri(cls: type[CheckpointType], uri: str) -> CheckpointType:
        """Create a checkpoint from a folder in remote storage, such as `s3://bucket/folder`.

        Raises:
            RuntimeError: No file system supports the URI.
        """
        return cls(_storage(uri))

    def to_uri(self, uri: str) -> str:
        """Upload the checkpoint's content to a folder in remote storage and return `uri`.

        Raises:
            RuntimeError: No file system supports the URI.
            OSError: The storage cannot be reached or rejects the files.
        """
        target = _storage(uri)
        if self.uri != target.uri:
            with self.as_directory() as folder:
                target.upload(Path(folder))
        return uri

    @property
    def path(self) -> str:
        """The path of the checkpoint's folder, without a URI scheme.

        Raises:
            AttributeError: The checkpoint is in memory and has no folder.
        """
        return self._folder_for("path").path

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` that contains the checkpoint's folder.

        Raises:
            AttributeError: The checkpoint is in memory and has no folder.
        """
        return self._folder_for("filesystem").filesystem

    @property
    def uri(self) -> str | None:
        """The URI of the checkpoint's folder, with `file://` for a local folder. None for a checkpoint in memory."""
        return self._folder.uri if self._folder is not None else None

    def _folder_for(self, name: str) -> Folder:
        if self._folder is not None:
            return self._folder
        raise AttributeError(
            f"This checkpoint is in memory and has no `{name}`: use `to_dict()`, or write it with `to_directory()`."
        )

    # ------------------------------------------------------------------------------------------ conversion and metadata

    @classmethod
    def from_checkpoint(cls: type[CheckpointType], other: Checkpoint) -> CheckpointType:
        """Convert a checkpoint to this class, as in `TorchCheckpoint.from_checkpoint(result.checkpoint)`.

        Raises:
            TypeError: `other` is not a checkpoint.
        """
        check_kind("other", other, Checkpoint, "a `raysgd.air.Checkpoint`")
        made = cls.__new__(cls)
        made.__dict__.update(other.__dict__)
        return made

    def by_place(self: CheckpointType) -> CheckpointType:
        """Return a copy of this checkpoint that is pickled as its folder's location, without the folder's files.

        If the folder was written from a dict, the dict is pickled as well, for machines that cannot access the folder.
        Other checkpoints in a local folder are pickled with the folder's files.
        """
        made = self.from_checkpoint(self)
        made._goes_by_place = True
        return made

    def get_internal_representation(self) -> tuple[str, Any]:
        """Return a pair: the type of the checkpoint's content, and the content or its location.

        The type is `data_dict` (followed by the dict), `object_ref` (the object reference), `local_path` (the folder's
        path) or `uri` (the folder's URI).
        """
        if self._folder is not None:
            return ("local_path", self._folder.path) if self._folder.is_local else ("uri", self._folder.uri)
        return "data_dict" if isinstance(self._data, dict) else "object_ref", self._data

    def get_preprocessor(self) -> Any:
        """Return the preprocessor that was saved with the checkpoint. Return None if there is no preprocessor."""
        folder = self._folder
        if folder is None:
            return self.to_dict().get(PREPROCESSOR_KEY)
        for name in (PREPROCESSOR_KEY, f"{PREPROCESSOR_KEY}{META_SUFFIX}"):
            if folder.has(name):
                return pickle.loads(folder.read(name))
        return self.to_dict().get(PREPROCESSOR_KEY) if folder.has(DICT_FILE) else None

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata that `set_metadata` and `update_metadata` have set for this checkpoint."""
        if self._folder is None:
            return dict(self._metadata)
        if not self._folder.has(METADATA_FILE):
            return {}
        metadata = json.loads(self._folder.read(METADATA_FILE))
        if not isinstance(metadata, dict):
            raise CheckpointCorruptedError(f"{self._folder}: `{METADATA_FILE}` holds no dict, but {metadata!r:.200}.")
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the checkpoint's metadata. A checkpoint in a folder stores its metadata in `.metadata.json`.

        Raises:
            TypeError: `metadata` is not a dict.
            ValueError: `metadata` cannot be encoded as JSON.
        """
        metadata = dict(checked_metadata(metadata))
        if self._folder is None:
            self._metadata = metadata
        else:
            self._folder.write(METADATA_FILE, json.dumps(metadata).encode())

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge a dict into the checkpoint's metadata.

        Raises:
            TypeError: `metadata` is not a dict.
            ValueError: `metadata` cannot be encoded as JSON.
        """
        self.set_metadata({**self.get_metadata(), **checked_metadata(metadata)})

    def __eq__(self, other: object) -> bool:
        """Return True if both checkpoints have the same folder. A checkpoint in memory equals only itself."""
        if not isinstance(other, Checkpoint) or self.uri is None:
            return self is other
        return self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri) if self.uri is not None else id(self)

    def __repr__(self) -> str:
        kind, data = self.get_internal_representation()
        shown = str(self._folder) if self._folder is not None else _short.repr(data)
        return f"{type(self).__name__}({kind}={shown})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: the location of a folder in remote storage, otherwise the content as a dict.

        After `by_place`, it is the location, and also the content of a folder that was written from a dict.
        """
        folder, state = self._folder, {**self.__dict__, "_goes_by_place": False}
        if folder is None:
            return state
        is_here_only = (folder.is_local or folder.is_in_memory) and not self._goes_by_place
        if is_here_only or (self._goes_by_place and folder.has(DICT_FILE)):
            state |= {"_data": self.to_dict(), "_metadata": self.get_metadata()}
        return state | {"_folder": None if is_here_only else folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._folder is not None and self._data is not None:  # both came; use the folder if this machine has it
            if self._folder.exists():
                self._data, self._metadata = None, {}
            else:
                self._folder = None


def _storage(uri: str) -> Folder:
    """Return the `Folder` at a URI.

    Raises:
        RuntimeError: No file system supports the URI.
    """
    try:
        return open_folder(uri, argument="uri")
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def _checked_dict(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise RuntimeError(f"`data={data!r:.200}`: a checkpoint needs a dict. Pass `{{'state': ...}}`.")
    if not data:
        raise ValueError("`data={}`: an empty dict is no checkpoint. Pass what the next run needs.")
    return data


def checked_metadata(metadata: Any) -> Mapping[str, Any]:
    """Validate a checkpoint's metadata and return it.

    Raises:
        TypeError: `metadata` is not a dict.
        ValueError: `metadata` cannot be encoded as JSON.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"`metadata={metadata!r:.200}`: need a dict.")
    try:
        json.dumps(dict(metadata))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`metadata={metadata!r:.200}`: need values that JSON can hold: {error}.") from error
    return metadata


def checkpoint_at(folder: Folder) -> Checkpoint:
    """Return the checkpoint in a local or remote folder."""
    if folder.is_local:
        return Checkpoint(str(folder.local_path))
    return Checkpoint(folder.path, folder.filesystem)


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


class TensorflowCheckpoint(Checkpoint):
    """A checkpoint with a Keras model's weights."""

    @classmethod
    def from_model(cls, model: Any, *, preprocessor: Any = None) -> TensorflowCheckpoint:
        """Create a checkpoint with a model's weights.

        Args:
            model: A built Keras model.
            preprocessor: The preprocessor for the model's inputs.

        Raises:
            TypeError: `model` is not a Keras model.
        """
        if not hasattr(model, "get_weights"):
            raise TypeError(f"`model={model!r:.200}`: need a Keras model.")
        return cls.from_dict({PREPROCESSOR_KEY: preprocessor, MODEL_KEY: model.get_weights()})

    @classmethod
    def from_h5(cls, file_path: str | Path, *, preprocessor: Any = None) -> TensorflowCheckpoint:
        """Create a checkpoint with the weights of a model that Keras has saved with `model.save("model.h5")`.

        Some versions of Keras run code in such a file: use it only for files that you trust like code.

        Raises:
            ValueError: The file does not exist, or its name does not end in `.h5`.
        """
        import tensorflow as tf

        if not Path(file_path).is_file() or Path(file_path).suffix != ".h5":
            raise ValueError(f"`file_path={masked(str(file_path))!r}`: need a file that ends in `.h5`.")
        model = tf.keras.models.load_model(file_path, compile=False)
        return cls.from_model(model, preprocessor=preprocessor)

    def get_model_weights(self) -> list[Any]:
        """Return the saved weights as NumPy arrays, in the order of `model.get_weights()`.

        Raises:
            RuntimeError: The checkpoint has no weights, or has a model of another framework.
        """
        content = self.to_dict()
        if MODEL_KEY not in content:
            raise RuntimeError(
                f'The checkpoint has no "{MODEL_KEY}". Available: {sorted(content)}. Create it with `from_model`.'
            )
        weights = content[MODEL_KEY]
        if not isinstance(weights, list | tuple):
            raise RuntimeError(
                f'The "{MODEL_KEY}" of the checkpoint is a `{type(weights).__name__}`, not the weights of a Keras '
                "model. For a model of PyTorch use `TorchCheckpoint` and `TorchPredictor`."
            )
        return list(weights)

    def get_model(self, model: Any | Callable[[], Any]) -> Any:
        """Return a model with the saved weights.

        Args:
            model: A built Keras model, whose weights are replaced, or a function that creates the model.

        Raises:
            RuntimeError: The checkpoint has no weights, or has a model of another framework.
        """
        made = model if hasattr(model, "set_weights") and not isinstance(model, type) else model()
        made.set_weights(self.get_model_weights())
        return made
