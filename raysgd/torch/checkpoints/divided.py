"""The state of models that are sharded over the ranks, in one part for each rank, and folders with such checkpoints.

Besides the parts, a sharded state has an index, which describes all tensors. The rows of a sharded tensor are split
over the ranks as `torch.chunk` would split them. A rank's part contains its rows of each sharded tensor. The part of
rank 0 also contains the tensors that are not sharded. The parts of a snapshot (the state that the driver keeps for
recovery) are in Ray's object store, where they outlive the workers. The parts of a checkpoint are files. When the state
is restored into a worker group of any size, each rank reads only the rows that it needs. The full state is assembled
only in a process that requests it.

In a checkpoint folder, each rank writes its part into a file with `torch.save`: a dict of tensors by their paths in the
state. The driver writes everything else into two checkpoint files in the same folder. `ranks.pt` contains the states of
every rank's random number generators. Only the driver reads this file. `rest.pt` contains the remaining state, an index
of the tensors' dtypes and shapes, and the size and checksum of each rank's file. `rest.pt` is written last. The folder
gets its final name once it is complete.

The index contains only plain values and is covered by the checksum of `rest.pt`. Before any memory is allocated, the
sizes in the index are compared with the recorded sizes of the files. Then the files are compared with their recorded
sizes and checksums, and their content with the index.

ADR 92 explains why no rank gathers the full state, and why the checkpoint is a folder.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.engine.transfers import DividedValue
from raysgd.core.files import check_regular, flush_to_disk, remove_leftovers
from raysgd.core.state.state_codec import decode
from raysgd.core.state.strict_reading import corrupted, require
from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.torch.checkpoints import checkpoint_file
from raysgd.torch.objects.rng import RNG
from raysgd.trainer.worker.replica_state import RESUME

Path_ = tuple[str | int, ...]
"""Path of a tensor in a state: the keys and list indices that lead to it."""

Tensors = Mapping[Path_, torch.Tensor]

Index = Mapping[Path_, tuple[torch.dtype, tuple[int, ...], bool]]
"""For each tensor in a state, by its path: dtype, full shape, and True if the tensor is sharded."""

MakeRoom = Callable[[Mapping[str, Any], Sequence[Path_]], dict[Path_, torch.Tensor]]
"""Function that allocates the tensors into which a rank reads its shard of a state.

It gets the state with placeholder tensors (see `DividedState.outline`), and the paths of these tensors in the state.
"""

_PARTS = ("models", "criterion", "optimizers")


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path_, torch.Tensor]]:
    """Separate the tensors of a state's models, criterion and optimizers from the remaining state.

    Tensors without dimensions, such as an optimizer's step count, stay in the remaining state.

    Returns:
        The remaining state, and the tensors by path. The state passed to this function does not change.

    Examples:
        >>> rest, tensors = split({"epoch": 1, "models": [{"weight": torch.ones(2)}]})
        >>> rest, list(tensors)
        ({'epoch': 1, 'models': [{}]}, [('models', 0, 'weight')])
    """
    tensors: dict[Path_, torch.Tensor] = {}
    parts = {name: _without(state[name], (name,), tensors) for name in _PARTS if name in state}
    return {**state, **parts}, tensors


def _without(value: Any, path: Path_, tensors: dict[Path_, torch.Tensor]) -> Any:
    if isinstance(value, Mapping):
        found = {key: each for key, each in value.items() if isinstance(each, torch.Tensor) and each.ndim}
        tensors.update({(*path, key): each for key, each in found.items()})
        return {key: _without(each, (*path, key), tensors) for key, each in value.items() if key not in found}
    if isinstance(value, list):
        return [_without(each, (*path, index), tensors) for index, each in enumerate(value)]
    return value


def joined(rest: Mapping[str, Any], paths: Iterable[Path_], tensor_of: Callable[[Path_], Any]) -> dict[str, Any]:
    """Insert tensors into a state from which `split` has removed them. Return the complete state.

    Args:
        rest: State without the tensors.
        paths: Paths of the tensors in the state.
        tensor_of: Function that returns the tensor for a path.

    Examples:
        >>> joined({"models": [{}]}, [("models", 0, "weight")], str)
        {'models': [{'weight': "('models', 0, 'weight')"}]}
    """
    made: dict[int, Any] = {}
    state = {name: _copied(value, made) if name in _PARTS else value for name, value in rest.items()}
    for path in paths:
        owner: Any = state
        for step in path[:-1]:
            owner = owner[step]
        owner[path[-1]] = tensor_of(path)
    return state


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """Copy nested dicts and lists, but not other values. A dict or list that occurs several times is copied once.

    Args:
        value: Value to copy.
        made: The copies so far, by the ID of the original.
    """
    if not isinstance(value, Mapping | list):
        return value
    if id(value) in made:
        return made[id(value)]
    copied: Any = [] if isinstance(value, list) else {}
    made[id(value)] = copied
    if isinstance(value, list):
        copied.extend(_copied(each, made) for each in value)
    else:
        copied.update({key: _copied(each, made) for key, each in value.items()})
    return copied


def content_of(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the part of a sharded state that a rank stores. Tensors are not copied.

    The part is a dict with the keys `tensors` (this rank's tensors by path), `rest` (the state without tensors) and
    `index` (a description of all tensors). The values of `rest` and `index` are None except on rank 0.
    """
    rest, tensors = split(state)
    is_divided = {path: _is_divided(tensor) for path, tensor in tensors.items()}
    kept = {path: _local(tensor) for path, tensor in tensors.items() if not rank or is_divided[path]}
    if rank:
        return {"rest": None, "index": None, "tensors": kept}
    index = {path: (each.dtype, tuple(each.shape), is_divided[path]) for path, each in tensors.items()}
    return {"rest": rest, "index": index, "tensors": kept}


class DividedState:
    """A sharded state, with one part for each rank that wrote the state. A part is read when it is first needed.

    Args:
        rest: State without the tensors of its models, criterion and optimizers. See `split`.
        index: Dtype and shape of each of these tensors, and whether it is sharded.
        num_parts: Number of ranks that wrote the state.
        read_part: Function that gets a rank and returns the tensors in its part, by path.

    Attributes:
        rest: State without the tensors of its models, criterion and optimizers.
        index: Dtype and shape of each of these tensors, and whether it is sharded.
    """

    def __init__(self, rest: dict[str, Any], index: Index, num_parts: int, read_part: Callable[[int], Tensors]) -> None:
        self.rest, self.index, self._num_parts = rest, index, num_parts
        self._part = cache(read_part)

    def outline(self) -> dict[str, Any]:
        """Return the state with placeholder tensors, which have a shape but take no memory."""

        def shape_of(path: Path_) -> torch.Tensor:
            dtype, size, _ = self.index[path]
            return torch.zeros((), dtype=dtype).expand(size)

        return joined(self.rest, self.index, shape_of)

    def whole(self) -> dict[str, Any]:
        """Read all parts, and return the full state. Its tensors are copies in new memory."""

        def tensor_of(path: Path_) -> torch.Tensor:
            if not self.index[path][2]:
                return self._part(0)[path].clone()
            return torch.cat([self._part(rank)[path] for rank in range(self._num_parts)])

        return joined(copy.deepcopy(self.rest), self.index, tensor_of)

    def make_room(self, make: MakeRoom) -> dict[Path_, torch.Tensor]:
        """Allocate the tensors into which `fill` reads this rank's shard. They are not the tensors of the models.

        Args:
            make: Function that gets the outline and the paths of the tensors, and allocates them.

        Raises:
            ValueError: The state does not fit the models.
        """
        return make(self.outline(), list(self.index))

    @torch.no_grad()
    def fill(self, room: Tensors) -> None:
        """Read this rank's rows of each tensor from the parts, and copy them into the tensors in `room`."""
        for path, tensor in room.items():
            local, (_, size, is_divided) = _local(tensor), self.index[path]
            if not is_divided and not _is_divided(tensor):
                local.copy_(self._part(0)[path])
                continue
            begin = _begin_here(tensor) if _is_divided(tensor) else 0
            sources = overlaps(size[0], self._num_parts if is_divided else 1, begin, begin + len(local))
            for rank, first, last in sources:
                at = begin_of(size[0], self._num_parts, rank) if is_divided else 0
                local[first - begin : last - begin].copy_(self._part(rank)[path][first - at : last - at])

    def joined(self, tensors: Tensors) -> dict[str, Any]:
        """Return the complete state with the given tensors, one for each path in the index."""
        return joined(self.rest, self.index, tensors.__getitem__)


def of_snapshot(parts: DividedValue) -> DividedState:
    """Return the sharded state in a snapshot. Each part is decoded when it is first needed.

    Args:
        parts: Encoded parts of the snapshot, one for each rank.
    """

    @cache
    def content(rank: int) -> dict[str, Any]:
        return decode(parts[rank], copy=False)

    first = content(0)
    return DividedState(first["rest"], first["index"], len(parts), lambda rank: content(rank)["tensors"])


def whole(shared_state: Any, copy: bool) -> Any:
    """Return the full state in a snapshot that the driver has.

    Args:
        shared_state: Encoded state of the snapshot, or its parts if it is sharded.
        copy: True to copy the tensors into new memory. Tensors of a sharded state are always copied.
    """
    is_divided = isinstance(shared_state, DividedValue)
    return of_snapshot(shared_state).whole() if is_divided else decode(shared_state, copy=copy)


def outline(shared_state: Any) -> Any:
    """Return the state in a snapshot, to inspect its structure. The tensors of a sharded state contain only zeros.

    Args:
        shared_state: Encoded state of the snapshot, or its parts if it is sharded.
    """
    is_divided = isinstance(shared_state, DividedValue)
    return of_snapshot(shared_state).outline() if is_divided else decode(shared_state, copy=False)


# ------------------------------------------------------------------------------------ the rows of a rank


def _placement(tensor: Any) -> Any:
    """Return how a `DTensor` is sharded (its placement). Return None for a plain tensor, which each rank has in full.

    A `DTensor` is recognized by an attribute, because importing the class `DTensor` is slow.
    """
    placements = getattr(tensor, "placements", None)
    return None if placements is None else placements[0]


def _is_divided(tensor: Any) -> bool:
    placement = _placement(tensor)
    is_divided = placement is not None and placement.is_shard()
    assert not is_divided or placement.dim == 0, "`fully_shard` divides rows"
    return is_divided


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a `DTensor`. Return a plain tensor unchanged."""
    return tensor if _placement(tensor) is None else tensor.to_local()


def _begin_here(tensor: Any) -> int:
    """Return the index of this rank's first row in a sharded tensor."""
    mesh = tensor.device_mesh
    return begin_of(tensor.shape[0], mesh.size(), mesh.get_local_rank())


def begin_of(total: int, num_ranks: int, rank: int) -> int:
    """Return the index of a rank's first row if `total` rows are split like `torch.chunk` splits them."""
    return min(total, rank * -(-total // num_ranks))


def overlaps(total: int, num_ranks: int, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return which ranks hold the rows from `begin` to `end` (exclusive) of a tensor.

    Args:
        total: Number of rows of the tensor.
        num_ranks: Number of ranks over which the rows are split, like `torch.chunk` splits them.
        begin: Index of the first row.
        end: Index after the last row.

    Returns:
        For each rank that holds some of these rows: the rank, the index of its first such row, and the index after its
        last such row.

    Examples:
        >>> overlaps(10, 3, 2, 9)  # the ranks have 4, 4 and 2 rows
        [(0, 2, 4), (1, 4, 8), (2, 8, 9)]
    """
    found = []
    for rank in range(num_ranks):
        first, last = max(begin, begin_of(total, num_ranks, rank)), min(end, begin_of(total, num_ranks, rank + 1))
        if first < last:
            found.append((rank, first, last))
    return found


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
def making_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
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


def emptied_folder(folder: Path) -> str:
    """Delete the files that a failed attempt to save has left in a checkpoint folder. Return the folder's path."""
    for entry in folder.iterdir():
        entry.unlink()
    return str(folder)


def finish_folder(folder: Path, parts: Sequence[WrittenPart], rest: dict[str, Any]) -> None:
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


def open_folder(path: str, weights_only: bool, *, for_rank: bool = False) -> DividedFolder:
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


def read_folder(place: StateInFolder, make_room: MakeRoom, group: Any) -> Mapping[str, Any]:
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
    folder = open_folder(place.path, place.weights_only, for_rank=True)
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
