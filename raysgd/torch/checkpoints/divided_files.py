"""Divided models in a folder: each rank writes and reads what it holds; no process needs the whole state.

`torch.distributed.checkpoint` writes the tensors, so other programs can read the folder with it. Here it is not read
with that library, which trusts what it reads, but with PyTorch's strict reader, as the index in our own file says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from raysgd._reading.strict_reading import corrupted
from raysgd.exceptions import CheckpointCorruptedError
from raysgd.torch.checkpoints import checkpoint_file
from raysgd.torch.checkpoints.divided_folder import (
    DIVIDED,
    FORMAT_VERSION,
    RANKS,
    REST,
    Files,
    MakeRoom,
    Path_,
    StateInFolder,
    StoredTensor,
    TensorPiece,
    WrittenPart,
    checked_files,
    checked_tensors,
    joined,
    name_of,
    split,
)
from raysgd.torch.checkpoints.divided_snapshot import TensorToFill
from raysgd.torch.objects.rng import RNG
from raysgd.worker.state.replica_state import RESUME

_METADATA = ".metadata"


def write(folder: str, state: Mapping[str, Any], own: Any, group: Any) -> WrittenPart:
    """Writes this rank's part of the state into a folder; all ranks do this at the same time.

    Args:
        folder: The folder.
        state: The state with what this rank has of divided tensors.
        own: What the rank has for itself.
        group: A process group of all ranks, for small tensors in host memory.

    Returns:
        What the driver needs to know.
    """
    rest, tensors = split(state)
    rank = dist.get_rank()
    files, stored = write_tensors(folder, tensors, rank, group)
    return WrittenPart(None if rank else rest, own, stored, files)


def write_tensors(
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
    with path.open("rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        return num_bytes, checkpoint_file.checksum_of(file, num_bytes).hexdigest()


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
            with Path(self.path, name).open("rb") as file:
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
    file.seek(piece.start)
    found = checkpoint_file.read_tensor(file.read(piece.num_bytes))
    kind = (found.dtype, found.layout, found.device.type)
    if kind != (stored.dtype, torch.strided, "cpu") or tuple(found.shape) != stored.size_of(piece):
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


def read(place: StateInFolder, make_room: MakeRoom, group: Any) -> Mapping[str, Any]:
    """The state in a folder, divided as it is here; nothing is changed. All ranks do this at the same time.

    Args:
        place: The folder.
        make_room: Makes the tensors that this rank has of a state.
        group: A process group of all ranks, for small tensors in host memory.

    Raises:
        CheckpointCorruptedError: The folder is damaged; on every rank.
        ValueError, KeyError: The state does not fit.
    """
    folder = opened(place.path, place.weights_only, for_rank=True)
    tensors = make_room(folder.outline(), [each.path for each in folder.tensors])
    _together(folder, group, lambda: folder.check(dist.get_rank(), dist.get_world_size()))
    _together(folder, group, lambda: folder.read_into(tensors))
    return folder.joined(tensors)


def _together(folder: DividedFolder, group: Any, read: Callable[[], None]) -> None:
    """Lets each rank do its share. Where one cannot, all ranks raise, so that none waits for others."""
    found: Exception | None = None
    try:
        read()
    except Exception as error:  # of any class: raised below, on all ranks
        found = error
    verdict = torch.tensor([found is not None], dtype=torch.uint8)
    dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)
    if found is not None or verdict.item():
        told = found or folder.corrupted("a file is missing, cannot be read, or was changed, another worker says")
        raise told.with_traceback(None)  # on every rank from this line: workers that failed alike are kept
