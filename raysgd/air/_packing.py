"""A checkpoint as a dict and as a folder: what is written where, and how each becomes the other.

* A dict is one file in a folder, `dict_checkpoint.pkl`. Other entries of that folder are part of the dict, packed.
* A folder without that file is a dict with one archive of all it holds, and with the content of each `KEY.meta.pkl`.

Reading a pickle runs what it says: read checkpoints only from where you trust. Names and archives never lead out of the
folder that is written.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from raysgd.exceptions import CheckpointCorruptedError

DICT_FILE = "dict_checkpoint.pkl"
METADATA_FILE = ".metadata.json"
META_SUFFIX = ".meta.pkl"
FOLDER_KEY = "fs_checkpoint"
EXTRA_FILES_KEY = "_ray_additional_checkpoint_files"


def folder_as_dict(folder: Path) -> dict[str, Any]:
    """Return what a folder holds, as a dict, without the metadata.

    Raises:
        FileNotFoundError: There is no such folder.
        CheckpointCorruptedError: `dict_checkpoint.pkl` is no dict.
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
    """Writes a dict into a folder, which may have been a folder before.

    Raises:
        CheckpointCorruptedError: A name or an archive in it leads out of the folder, or the archive is no archive.
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
    """The place of an entry of a folder."""
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
    """Unpacks an archive; the filter refuses absolute names, names and links that lead out of it, and devices."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, TypeError) as error:
        raise CheckpointCorruptedError(
            f"The checkpoint's archive cannot be unpacked into {folder}: {error}. Nothing outside of it was written."
        ) from error


def _load(file: Path) -> Any:
    with open(file, "rb") as stream:
        return pickle.load(stream)


def _dump(value: Any, file: Path) -> None:
    import cloudpickle

    with open(file, "wb") as stream:
        cloudpickle.dump(value, stream, protocol=5)
