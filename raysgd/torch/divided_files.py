"""The tensors of divided models in a folder: each rank writes and reads what it holds.

`torch.distributed.checkpoint` does the work, so any number of ranks reads what any number has written. Nothing in the
folder runs code when it is read: the file of that library that could is read with a list of what it may name.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from raysgd.exceptions import CheckpointCorruptedError
from raysgd.replicas.replica_state import RESUME
from raysgd.torch import _seal, checkpoint_file
from raysgd.torch.divided_folder import DIVIDED, FORMAT_VERSION, RANKS, REST, Path_, joined, name_of
from raysgd.torch.rng import RNG

_METADATA = ".metadata"
_PIECE_BYTES = 2**20
_PLAIN_GLOBALS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # a layout by its name
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
}


def write_part(folder: str, tensors: Mapping[Path_, torch.Tensor], rank: int, group: Any) -> dict[str, tuple[int, str]]:
    """Writes what this rank holds; all ranks do this at the same time.

    What all ranks have alike is written by rank 0.

    Returns:
        Number of bytes and checksum of each file that it wrote.
    """
    own = {
        name_of(path): tensor.detach() for path, tensor in tensors.items() if not rank or isinstance(tensor, DTensor)
    }
    save(own, storage_writer=FileSystemWriter(folder), process_group=group)
    names = sorted(entry.name for entry in Path(folder).glob(f"__{rank}_*"))
    return {name: _facts_of(Path(folder, name)) for name in ([*names, _METADATA] if not rank else names)}


def _facts_of(path: Path) -> tuple[int, str]:
    checksum, num_bytes = _seal.new_checksum(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            checksum.update(piece)
            num_bytes += len(piece)
    return num_bytes, checksum.hexdigest()


@dataclass(frozen=True)
class DividedFolder:
    """A folder that was opened.

    Attributes:
        path: Where it is.
        rest: Everything but tensors.
        paths: Where the tensors belong.
        files: Number of bytes and checksum of each file.
        metadata: What the tensors are.
    """

    path: str
    rest: dict[str, Any]
    paths: tuple[Path_, ...]
    files: Mapping[str, tuple[int, str]]
    metadata: Metadata

    def facts_of(self, path: Path_) -> TensorStorageMetadata:
        """Shape and type of a tensor.

        Raises:
            CheckpointCorruptedError: There is no such tensor.
        """
        found = self.metadata.state_dict_metadata.get(name_of(path))
        if not isinstance(found, TensorStorageMetadata):
            raise self.corrupted(f"the tensor `{name_of(path)}` is missing")
        return found

    def outline(self) -> dict[str, Any]:
        """The state with tensors that have a shape and no memory."""
        return joined(self.rest, self.paths, self._shape_of)

    def _shape_of(self, path: Path_) -> torch.Tensor:
        facts = self.facts_of(path)
        return torch.zeros((), dtype=facts.properties.dtype).expand(facts.size)

    def check(self, rank: int, num_ranks: int) -> None:
        """Compares checksums: of every `num_ranks`-th file, since together the ranks look at all.

        Raises:
            CheckpointCorruptedError: A file is missing or was changed.
        """
        for name in sorted(self.files)[rank::num_ranks]:
            path = Path(self.path, name)
            if not path.is_file() or _facts_of(path) != tuple(self.files[name]):
                raise self.corrupted(f"`{name}` is missing or does not match its checksum")

    def read_into(self, tensors: Mapping[Path_, torch.Tensor], group: Any = None, *, alone: bool = False) -> None:
        """Fills tensors, of which each rank may have a part; all ranks do this at the same time, but for `alone`."""
        named = {name_of(path): tensor for path, tensor in tensors.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(named, storage_reader=_Reader(self.path), process_group=group, no_dist=alone)

    def read_whole(self) -> dict[str, Any]:
        """The whole state in this process."""
        self.check(0, 1)
        facts = {path: self.facts_of(path) for path in self.paths}
        tensors = {path: torch.empty(each.size, dtype=each.properties.dtype) for path, each in facts.items()}
        self.read_into(tensors, alone=True)
        return joined(self.rest, self.paths, tensors.__getitem__)

    def corrupted(self, finding: str) -> CheckpointCorruptedError:
        """What to raise where the folder is not what was written."""
        return _corrupted(self.path, finding)


def opened(path: str, weights_only: bool, *, for_rank: bool = False) -> DividedFolder:
    """Reads everything but tensors.

    Args:
        path: The folder.
        weights_only: Whether to refuse what could run code.
        for_rank: Whether to leave out the random states of all ranks: one rank needs its own, which the driver has.

    Raises:
        CheckpointCorruptedError: It is damaged, or no such folder.
        UnsafeCheckpointError: The operator's own state needs `weights_only=False`.
    """
    rest = checkpoint_file.read(Path(path, REST), weights_only=weights_only)
    facts = rest.get(DIVIDED)
    if not isinstance(facts, Mapping) or facts.get("version") != FORMAT_VERSION:
        raise _corrupted(path, f"`{REST}` is of another format; a newer version of raysgd may have written it")
    if facts.get("has_ranks") and not for_rank:
        rest = {**rest, RESUME: {**rest[RESUME], RNG: _rank_states(path)}}
    paths = tuple(tuple(each) for each in facts["paths"])
    return DividedFolder(path, rest, paths, facts["files"], _Reader(path).read_metadata())


def _rank_states(path: str) -> Any:
    try:
        return checkpoint_file.read(Path(path, RANKS))[RNG]
    except (FileNotFoundError, KeyError) as error:
        raise _corrupted(path, f"`{RANKS}` is missing or of another format") from error


def _corrupted(path: str, finding: str) -> CheckpointCorruptedError:
    return CheckpointCorruptedError(
        f"`{path}` is no intact checkpoint: {finding}. It was damaged, or not copied to its end. Copy it again from "
        "where it came from, or load an earlier checkpoint."
    )


class _Reader(FileSystemReader):
    """Reads what describes the tensors without running code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the tensors are, and which file has which part of them.

        Raises:
            CheckpointCorruptedError: It is damaged, or names what could run code.
        """
        try:
            with Path(self.path, _METADATA).open("rb") as file:
                metadata: Metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # damaged bytes may ask for anything, such as more memory than there is
            raise _corrupted(str(self.path), f"`{_METADATA}` cannot be read ({error})") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A class that such a file may name."""
        module = "pathlib" if module == "pathlib._local" else module  # so Python 3.13 calls it
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if is_type or name in _PLAIN_GLOBALS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names `{module}.{name}`")
