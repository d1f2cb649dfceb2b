"""The tensors of divided models in a folder: each rank writes and reads what it holds.

`torch.distributed.checkpoint` writes them, so other programs can read the folder with it. Here it is not read with that
library, which trusts what it reads, but with the strict reader of checkpoint files, as the index in our own file says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from raysgd._reading.strict_reading import corrupted, fill
from raysgd.exceptions import CheckpointCorruptedError
from raysgd.torch.checkpoints import checkpoint_file, seal
from raysgd.torch.checkpoints.divided_folder import DIVIDED, FORMAT_VERSION, RANKS, REST, joined, name_of
from raysgd.torch.checkpoints.divided_index import (
    Files,
    Path_,
    StoredTensor,
    TensorPiece,
    checked_files,
    checked_tensors,
)
from raysgd.torch.checkpoints.divided_tensors import TensorToFill
from raysgd.torch.checkpoints.tensor_file import read_archive
from raysgd.torch.objects.rng import RNG
from raysgd.worker.state.replica_state import RESUME

_METADATA = ".metadata"
_PIECE_BYTES = 2**20


def write_part(
    folder: str, tensors: Mapping[Path_, torch.Tensor], rank: int, group: Any
) -> tuple[Files, Sequence[StoredTensor]]:
    """Writes what this rank holds; all ranks do this at the same time.

    What all ranks have alike is written by rank 0.

    Returns:
        The files that it wrote; and from rank 0, which file has which part of the tensors.
    """
    own = {
        name_of(path): tensor.detach() for path, tensor in tensors.items() if not rank or isinstance(tensor, DTensor)
    }
    metadata = save(own, storage_writer=FileSystemWriter(folder), process_group=group)
    names = sorted(entry.name for entry in Path(folder).glob(f"__{rank}_*"))
    files = {name: _facts_of(Path(folder, name)) for name in ([*names, _METADATA] if not rank else names)}
    return files, () if rank else [_stored(path, metadata) for path in tensors]


def _stored(path: Path_, metadata: Metadata) -> StoredTensor:
    """Return where the library put a tensor."""
    name = name_of(path)
    facts: Any = metadata.state_dict_metadata[name]
    size = tuple(facts.size)
    dims = [dim for chunk in facts.chunks for dim in range(len(size)) if chunk.sizes[dim] != size[dim]]
    dim = dims[0] if dims else 0
    pieces = []
    for chunk in facts.chunks:
        if chunk.sizes[dim]:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            pieces.append(
                TensorPiece(chunk.offsets[dim], chunk.sizes[dim], place.relative_path, place.offset, place.length)
            )
    return StoredTensor(path, facts.properties.dtype, size, dim, tuple(sorted(pieces)))


def _facts_of(path: Path) -> tuple[int, str]:
    checksum, num_bytes = seal.new_checksum(), 0
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
        tensors: What the tensors are, and where.
        files: Number of bytes and checksum of each file.
    """

    path: str
    rest: dict[str, Any]
    tensors: tuple[StoredTensor, ...]
    files: Files

    def outline(self) -> dict[str, Any]:
        """The state with tensors that have a shape and no memory.

        Raises:
            CheckpointCorruptedError: The rest has no place for one.
        """
        return self.joined({each.path: torch.zeros((), dtype=each.dtype).expand(each.size) for each in self.tensors})

    def joined(self, tensors: Mapping[Path_, torch.Tensor]) -> dict[str, Any]:
        """The state with these tensors in it.

        Raises:
            CheckpointCorruptedError: The rest has no place for one.
        """
        try:
            return joined(self.rest, list(tensors), tensors.__getitem__)
        except (TypeError, LookupError) as error:
            raise self.corrupted(f"`{REST}` has no place for a tensor ({str(error)[:100]})") from error

    def check(self, rank: int, num_ranks: int) -> None:
        """Compares checksums: of every `num_ranks`-th file, since together the ranks look at all.

        Raises:
            CheckpointCorruptedError: A file is missing or was changed.
        """
        for name in sorted(self.files)[rank::num_ranks]:
            path, (num_bytes, _) = Path(self.path, name), self.files[name]
            if not path.is_file() or path.stat().st_size != num_bytes or _facts_of(path) != self.files[name]:
                raise self.corrupted(f"`{name}` is missing or does not match its checksum")

    def read_into(self, tensors: Mapping[Path_, torch.Tensor]) -> None:
        """Fills tensors, of which each rank may have a part. Call `check` first.

        Raises:
            CheckpointCorruptedError: A file has something else than it should.
        """
        wanted = [
            (piece, stored, room)
            for stored in self.tensors
            for room in [TensorToFill.of(tensors[stored.path])]
            for piece in stored.pieces
            if _overlap(piece, room.span(stored.dim))
        ]
        wanted.sort(key=lambda part: (part[0].file, part[0].start))
        for name, parts in groupby(wanted, lambda part: part[0].file):
            with Path(self.path, name).open("rb", buffering=0) as file:
                for piece, stored, room in parts:
                    self._take(piece, stored, room, file)

    def _take(self, piece: TensorPiece, stored: StoredTensor, room: TensorToFill, file: IO[bytes]) -> None:
        """Reads a part of a stored tensor, of which some belongs into this room."""
        try:
            found = _tensor_in(file, piece, stored)
            with torch.no_grad():
                room.take(found, stored.dim, piece.first)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # damaged bytes may say anything
            raise self.corrupted(f"`{piece.file}` cannot be read ({str(error)[:100]})") from error

    def read_whole(self) -> dict[str, Any]:
        """The whole state in this process."""
        self.check(0, 1)
        tensors = {each.path: torch.empty(each.size, dtype=each.dtype) for each in self.tensors}
        self.read_into(tensors)
        return self.joined(tensors)

    def corrupted(self, finding: str) -> CheckpointCorruptedError:
        """Return what to raise where the folder is not what was written."""
        return corrupted(self.path, finding)


def _tensor_in(file: IO[bytes], piece: TensorPiece, stored: StoredTensor) -> torch.Tensor:
    archive = memoryview(bytearray(piece.num_bytes))
    file.seek(piece.start)
    fill(archive, file)
    found = read_archive(archive)
    if (
        not isinstance(found, torch.Tensor)
        or (found.dtype, found.layout, found.device.type) != (stored.dtype, torch.strided, "cpu")
        or tuple(found.shape) != stored.size_of(piece)
    ):
        raise ValueError("a tensor is another one than the index says")
    return found


def _overlap(piece: TensorPiece, span: tuple[int, int]) -> bool:
    return piece.first < span[1] and span[0] < piece.first + piece.length


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
        raise corrupted(path, f"`{REST}` is of another format; a newer version of raysgd may have written it")
    try:
        files = checked_files(facts["files"])
        tensors = checked_tensors(facts["tensors"], files)
        resume = dict(rest.get(RESUME) or {})
    except (KeyError, TypeError, ValueError) as error:
        raise corrupted(path, f"`{REST}` contradicts itself ({str(error)[:100]})") from error
    if facts.get("has_ranks") and not for_rank:
        rest = {**rest, RESUME: {**resume, RNG: _rank_states(path)}}
    return DividedFolder(path, rest, tensors, files)


def _rank_states(path: str) -> Any:
    try:
        return checkpoint_file.read(Path(path, RANKS))[RNG]
    except (FileNotFoundError, KeyError) as error:
        raise corrupted(path, f"`{RANKS}` is missing or of another format") from error
