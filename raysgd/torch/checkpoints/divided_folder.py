"""Reads and writes checkpoint folders, in which sharded models are saved.

Each rank writes its tensors into a file with `torch.save`: a dict of tensors by their paths in the state. The driver
writes everything else into two checkpoint files in the same folder. `ranks.pt` contains the states of every rank's
random number generators. Only the driver reads this file. `rest.pt` contains the remaining state, an index of the
tensors' dtypes and shapes, and the size and checksum of each rank's file. `rest.pt` is written last. The folder gets
its final name once it is complete.

The index contains only plain values and is covered by the checksum of `rest.pt`. Before any memory is allocated, the
sizes in the index are compared with the recorded sizes of the files. Then the files are compared with their recorded
sizes and checksums, and their content with the index.

ADR 92 explains why the checkpoint is a folder. `raysgd.torch.checkpoints.divided_state` describes what each rank writes
and reads.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.files import check_regular, flush_to_disk, remove_leftovers
from raysgd.core.state.strict_reading import corrupted, require
from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.torch.checkpoints import checkpoint_file
from raysgd.torch.checkpoints.divided_state import DividedState, Index, MakeRoom, Tensors, begin_of, content_of
from raysgd.torch.objects.rng import RNG
from raysgd.trainer.worker.replica_state import RESUME

REST = "rest.pt"
"""File with everything except the tensors and the random number generators' states."""

RANKS = "ranks.pt"
"""File with the random number generators' states of all ranks. Its size grows with the number of ranks."""

DIVIDED = "divided"
"""Key in `REST` for the layout's version, the index of the tensors, and the size and checksum of each rank's file."""

FORMAT_VERSION = 3
"""Version of the folder's layout that this module reads and writes."""

FileFacts = tuple[int, str]
"""Number of bytes and checksum of a file."""

_MAX_DIMS = 64
_MAX_SIZE = 2**62
_FORMER = ".old"


@dataclass(frozen=True)
class StateInFolder:
    """Reference to a checkpoint folder. The driver sends the reference to all ranks, and each rank reads the folder.

    Attributes:
        path: Path of the folder.
        weights_only: True to reject files whose loading could run arbitrary code.
    """

    path: str
    weights_only: bool


@dataclass(frozen=True)
class WrittenPart:
    """The report of a rank to the driver after it wrote its file into a checkpoint folder.

    Attributes:
        rest: The state without tensors; None except from rank 0.
        index: Index of the tensors in the state; None except from rank 0.
        own: State that differs between ranks: the states of this rank's random number generators.
        file: Size and checksum of the file that the rank wrote.
    """

    rest: dict[str, Any] | None
    index: Index | None
    own: Any
    file: FileFacts


def part_name(rank: int) -> str:
    """Return the name of the file in a checkpoint folder that contains the tensors of one rank."""
    return f"part-{rank}.pt"


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return True if `path` is a checkpoint folder of sharded models."""
    return Path(path, REST).is_file()


# ------------------------------------------------------------------------------------ writing


def write_part(folder: str, state: Mapping[str, Any], own: Any, rank: int) -> WrittenPart:
    """Write this rank's tensors into a file in a checkpoint folder.

    Args:
        folder: Path of the folder.
        state: State with this rank's rows of the sharded tensors.
        own: State that differs between ranks: the states of this rank's random number generators.
        rank: Rank of this process, which determines the file's name.

    Returns:
        A report for the driver, with everything that is not in the file, and with the file's size and checksum.
    """
    content, path = content_of(state, rank), Path(folder, part_name(rank))
    torch.save(_each_with_its_memory(content["tensors"]), path)
    flush_to_disk(path)
    return WrittenPart(content["rest"], content["index"], own, _facts_of(path))


def _each_with_its_memory(tensors: Tensors) -> Tensors:
    """Return the tensors. Clone each one that covers only a part of its storage, or shares it with an earlier tensor.

    `torch.save` would write the whole storage of a tensor that covers only a part of it. A shared storage would be
    written only once. Reading would then reject the file as smaller than its tensors.
    """
    apart, seen = {}, set[int]()
    for path, tensor in tensors.items():
        memory = tensor.untyped_storage()
        is_whole = memory.nbytes() == tensor.numel() * tensor.itemsize and memory.data_ptr() not in seen
        seen.add(memory.data_ptr())
        apart[path] = tensor if is_whole else tensor.clone()
    return apart


def _facts_of(path: Path) -> FileFacts:
    with path.open("rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        return num_bytes, checkpoint_file.checksum_of(file, num_bytes).hexdigest()


@contextlib.contextmanager
def making(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, into which a checkpoint is written in the `with` block.

    After the block, rename the folder to `path`, replacing an earlier checkpoint there. If the block raises, delete the
    folder instead.

    Raises:
        OSError: The folder could not be written, or `path` is a folder with other content.
    """
    target = Path(os.path.abspath(path))
    if not target.is_symlink() and target.is_dir() and not is_folder(target) and any(target.iterdir()):
        raise IsADirectoryError(f"`{path}` is a folder with other content than a checkpoint: save to another path.")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent)
    beside = target.with_name(f".raysgd-{target.name}-{uuid.uuid4().hex[:8]}.tmp")
    beside.mkdir()
    try:
        yield beside
        flush_to_disk(beside)
        _take_name(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _take_name(folder: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        target.rename(folder.with_name(f"{folder.name}{_FORMER}"))
    else:
        target.unlink(missing_ok=True)  # a folder cannot be renamed to the path of a file, such as a checkpoint
    folder.rename(target)
    # The pattern also matches folders that a killed process has left.
    formers = f".raysgd-{glob.escape(target.name)}-????????.tmp{_FORMER}"
    for former in target.parent.glob(formers):
        shutil.rmtree(former, ignore_errors=True)
    flush_to_disk(target.parent)


def emptied(folder: Path) -> str:
    """Delete the files that a failed attempt to save has left in a checkpoint folder. Return the folder's path."""
    for entry in folder.iterdir():
        entry.unlink()
    return str(folder)


def finish(folder: Path, parts: Sequence[WrittenPart], rest: dict[str, Any]) -> None:
    """Complete a checkpoint folder: check that all ranks' files exist, then write the driver's files.

    Args:
        folder: Folder into which the ranks wrote.
        parts: What the ranks reported, in the order of the ranks.
        rest: The state without tensors.

    Raises:
        OSError: On the driver's machine, a rank's file is missing or does not have the size that the rank reported. Or
            the driver cannot write its own files.
    """
    files = {part_name(rank): part.file for rank, part in enumerate(parts)}
    missing = [name for name, (num_bytes, _) in files.items() if _size_of(folder / name) != num_bytes]
    if missing:
        raise OSError(
            f"{len(missing)} of {len(files)} files that workers wrote are not in `{folder.parent}` on the driver's "
            "machine. Each worker writes its own shard, so save to a path that all nodes share, or pass "
            "`whole=True`, which gathers the whole state on the driver."
        )
    facts = {"version": FORMAT_VERSION, "index": parts[0].index, "files": list(files.values())}
    resume = dict(rest.get(RESUME) or {})
    if RNG in resume:
        checkpoint_file.write(folder / RANKS, {**dict.fromkeys(checkpoint_file.REQUIRED_KEYS), RNG: resume.pop(RNG)})
        rest, facts = {**rest, RESUME: resume}, {**facts, "has_ranks": True}
    checkpoint_file.write(folder / REST, {**rest, DIVIDED: facts})


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


# ------------------------------------------------------------------------------------ reading


class DividedFolder(DividedState):
    """The sharded state in a checkpoint folder. Call `check`, which verifies checksums, before you read any tensor."""

    def __init__(self, path: str, rest: dict[str, Any], index: Index, files: Sequence[FileFacts]) -> None:
        super().__init__(rest, index, len(files), self._read_part)
        self._path, self._files = path, files

    def check(self, rank: int, num_ranks: int) -> None:
        """Verify the sizes and checksums of some files in the folder. Together, the ranks verify all files.

        Args:
            rank: Rank of this process, which verifies every `num_ranks`-th file, starting with the file of this rank.
            num_ranks: Number of ranks.

        Raises:
            CheckpointCorruptedError: A file is missing or was changed.
        """
        for number in range(rank, len(self._files), num_ranks):
            path = Path(self._path, part_name(number))
            if _size_of(path) != self._files[number][0] or _facts_of(path) != self._files[number]:
                raise self.corrupted(f"`{path.name}` is missing or does not match its checksum")

    def read_whole(self) -> dict[str, Any]:
        """Verify all files, read all tensors, and return the full state."""
        self.check(0, 1)
        return self.whole()

    def _read_part(self, rank: int) -> Tensors:
        try:
            found = checkpoint_file.read_tensors(Path(self._path, part_name(rank)))
            self._check_part(rank, found)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # reading a damaged file may raise any exception
            raise self.corrupted(f"`{part_name(rank)}` cannot be read ({str(error)[:100]})") from error
        return found

    def _check_part(self, rank: int, found: Mapping[Any, torch.Tensor]) -> None:
        num = len(self._files)
        expected = {path: facts for path, facts in self.index.items() if not rank or facts[2]}
        require(found.keys() == expected.keys(), "its tensors are not those of the index")
        for path, (dtype, size, is_divided) in expected.items():
            num_rows = begin_of(size[0], num, rank + 1) - begin_of(size[0], num, rank) if is_divided else size[0]
            kind = (found[path].dtype, found[path].layout, found[path].device.type, tuple(found[path].shape))
            is_it = kind == (dtype, torch.strided, "cpu", (num_rows, *size[1:]))
            require(is_it, "a tensor differs from its entry in the index")

    def corrupted(self, finding: str) -> CheckpointCorruptedError:
        """Return the error to raise for a damaged folder.

        Args:
            finding: Description of the damage.
        """
        return corrupted(self._path, finding)


def opened(path: str, weights_only: bool, *, for_rank: bool = False) -> DividedFolder:
    """Open a checkpoint folder and read everything except the tensors.

    Args:
        path: Path of the folder.
        weights_only: True to reject files whose loading could run arbitrary code.
        for_rank: True to skip `ranks.pt`, which contains the states of every rank's random number generators. A rank
            gets the states of its generators from the driver.

    Raises:
        CheckpointCorruptedError: The folder is damaged or has another format.
        UnsafeCheckpointError: A value in the state, such as one that the operator's `state_dict` returned, cannot be
            loaded with `weights_only=True`.
    """
    for each in Path(path).iterdir():
        check_regular(each)
    rest = checkpoint_file.read(Path(path, REST), weights_only=weights_only)
    facts = rest.pop(DIVIDED, None)
    version = facts.get("version") if isinstance(facts, Mapping) else None
    if not isinstance(version, int) or version != FORMAT_VERSION:
        raise corrupted(path, f"`{REST}` has an unknown format; another version of raysgd may have written it")
    try:
        if facts.get("has_ranks") and not for_rank:
            rest = {**rest, RESUME: {**dict(rest.get(RESUME) or {}), RNG: _rank_states(path)}}
        _check_index(facts["index"], facts["files"])
        folder = DividedFolder(path, rest, facts["index"], [tuple(each) for each in facts["files"]])
        folder.outline()
    except (OSError, MemoryError, CheckpointCorruptedError, UnsafeCheckpointError):
        raise
    except Exception as error:  # a damaged index may cause any exception
        raise corrupted(path, f"`{REST}` contradicts itself ({str(error)[:100]})") from error
    return folder


def _check_index(index: Any, files: Any) -> None:
    """Check that the index does not describe more data than the files contain, according to their recorded sizes.

    Raises:
        ValueError, TypeError: The index describes more data, or is malformed.
    """
    require(type(index) is dict and type(files) is list and len(files) > 0, "it has no list of tensors or files")
    num_there = sum(num_bytes for num_bytes, _ in files)
    num_bytes = 0
    for path, (dtype, size, is_divided) in index.items():
        require(type(path) is tuple and 1 < len(path) <= _MAX_DIMS, "a tensor has no path")
        require(
            isinstance(dtype, torch.dtype) and type(is_divided) is bool, "a tensor has no valid dtype or sharding flag"
        )
        is_shape = type(size) is tuple and 0 < len(size) <= _MAX_DIMS
        require(is_shape and all(type(each) is int and each >= 0 for each in size), "a tensor has no shape")
        require(math.prod(max(1, each) for each in size) < _MAX_SIZE, "a tensor has no shape")
        num_bytes += math.prod(size) * dtype.itemsize
    require(num_bytes <= num_there, "its tensors are larger than its files")


def _rank_states(path: str) -> Any:
    try:
        return checkpoint_file.read(Path(path, RANKS))[RNG]
    except (FileNotFoundError, KeyError) as error:
        raise corrupted(path, f"`{RANKS}` is missing or has an unknown format") from error


def read(place: StateInFolder, make_room: MakeRoom, group: Any) -> Mapping[str, Any]:
    """Read this rank's shard of the state in a checkpoint folder, without loading it into the models.

    All ranks must call this function together.

    Args:
        place: Reference to the folder.
        make_room: Function that allocates this rank's tensors, into which the files are read.
        group: Process group of all ranks. Its backend must be able to all-reduce tensors in host memory.

    Raises:
        CheckpointCorruptedError: The folder is damaged. Raised on every rank.
        ValueError: The state does not fit the models.
    """
    folder = opened(place.path, place.weights_only, for_rank=True)
    room = folder.make_room(make_room)
    _together(folder, group, lambda: folder.check(dist.get_rank(), dist.get_world_size()))
    _together(folder, group, lambda: folder.fill(room))
    return folder.joined(room)


def _together(folder: DividedFolder, group: Any, read: Callable[[], None]) -> None:
    """Call `read`. If it raises on any rank, raise on all ranks, so that no rank waits for the one that failed.

    Args:
        folder: The checkpoint folder, for errors.
        group: Process group of all ranks.
        read: Function that reads a part of the folder.
    """
    found: Exception | None = None
    try:
        read()
    except Exception as error:  # raised below, after the other ranks have been notified
        found = error
    verdict = torch.tensor([found is not None], dtype=torch.uint8)
    dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)
    if found is not None or verdict.item():
        told = found or folder.corrupted(
            "another worker reported that a file is missing, cannot be read, or was changed"
        )
        # Remove the traceback, which differs between ranks. Workers that all raise the same error are not replaced.
        raise told.with_traceback(None)
