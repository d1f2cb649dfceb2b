"""The folder that a checkpoint of divided models is: how it becomes whole, and which tensor belongs where.

Each rank writes its part. Everything but tensors is in two checkpoint files beside them, which the driver writes: what
each rank has for itself, which ranks need not read, and the rest. That comes last, and also has checksums of the other
files. The folder takes its name when all of it is there.

The rest has an index too: each tensor's kind and size, and which file has which part of it. It is plain data under a
checksum. It names all that is read of the folder, and its numbers are compared with the sizes of the files before
anything is made.

Why a folder: ADR 92. `raysgd.torch.checkpoints.divided_files` writes and reads the tensors.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from raysgd._files import flush_to_disk, remove_leftovers
from raysgd._reading.strict_reading import require
from raysgd.torch.checkpoints import checkpoint_file
from raysgd.torch.objects.rng import RNG
from raysgd.worker.state.replica_state import RESUME

REST = "rest.pt"
"""The file with everything but tensors, and but the random states."""

RANKS = "ranks.pt"
"""The file with the random states of all ranks; the larger, the more there are."""

DIVIDED = "divided"
"""Key in it of what there is to know about the other files."""

FORMAT_VERSION = 2
"""The layout of the folder."""

Path_ = tuple[str | int, ...]
"""The place of a tensor in a state."""

Files = Mapping[str, tuple[int, str]]
"""Number of bytes and checksum of each file, by its name in the folder."""

MakeRoom = Callable[[Mapping[str, Any], Sequence[Path_]], dict[Path_, torch.Tensor]]
"""Makes the tensors that a rank has of a state: of its outline, and the paths in it where they belong."""

_MAX_DIMS = 64
_MAX_SIZE = 2**62
_MAX_REPETITION = 16
"""The number of times that all files may be read, at most: several parts may lie in the same place."""

_FORMER = ".old"
_PARTS = ("models", "criterion", "optimizers")


@dataclass(frozen=True, order=True)
class TensorPiece:
    """A part of a tensor, as one archive inside a file.

    Attributes:
        first: Where in the tensor it begins, along the dimension by which that is divided.
        length: Its length along this dimension.
        file: The name of the file.
        start: Where in the file the archive begins.
        num_bytes: Size of the archive.
    """

    first: int
    length: int
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """The places of the parts of one tensor in the files of a folder checkpoint.

    Attributes:
        path: Where in a state it belongs.
        dtype: Its kind.
        size: Its shape.
        dim: By which dimension it is divided.
        pieces: Its parts, in order.
    """

    path: Path_
    dtype: torch.dtype
    size: tuple[int, ...]
    dim: int
    pieces: tuple[TensorPiece, ...]

    def size_of(self, piece: TensorPiece) -> tuple[int, ...]:
        """The shape of a part."""
        return (*self.size[: self.dim], piece.length, *self.size[self.dim + 1 :])


@dataclass(frozen=True)
class StateInFolder:
    """Stands for the state in a folder, which each rank reads by itself.

    Attributes:
        path: The folder.
        weights_only: Whether to refuse what could run code.
    """

    path: str
    weights_only: bool


@dataclass(frozen=True)
class WrittenPart:
    """The facts about a rank's part of a folder.

    Attributes:
        rest: The state without tensors, from rank 0; None from others.
        own: What the rank has for itself.
        tensors: Which file has which part of the tensors, from rank 0; empty from others.
        files: The files that it wrote.
    """

    rest: dict[str, Any] | None
    own: Any
    tensors: Sequence[StoredTensor]
    files: Files


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether this is such a folder."""
    return Path(path, REST).is_file()


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path_, torch.Tensor]]:
    """A state without the tensors of its models and optimizers, and these.

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


def joined(rest: Mapping[str, Any], paths: Sequence[Path_], tensor_of: Callable[[Path_], Any]) -> dict[str, Any]:
    """The state with its tensors.

    Examples:
        >>> joined({"models": [{}]}, [("models", 0, "weight")], str)
        {'models': [{'weight': "('models', 0, 'weight')"}]}
    """
    made: dict[int, Any] = {}
    state = {name: _copied(value, made) if name in _PARTS else value for name, value in rest.items() if name != DIVIDED}
    for path in paths:
        owner: Any = state
        for step in path[:-1]:
            owner = owner[step]
        owner[path[-1]] = tensor_of(path)
    return state


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """A copy of the containers alone, one of each."""
    if not isinstance(value, Mapping | list):
        return value
    if id(value) in made:
        return made[id(value)]
    copy: Any = [] if isinstance(value, list) else {}
    made[id(value)] = copy
    if isinstance(value, list):
        copy.extend(_copied(each, made) for each in value)
    else:
        copy.update({key: _copied(each, made) for key, each in value.items()})
    return copy


def name_of(path: Path_) -> str:
    """Return what a tensor is called in the files."""
    return "/".join(map(str, path))


@contextlib.contextmanager
def making(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder beside `path` that takes its name when the block ends well, also in the place of an earlier one.

    Raises:
        OSError: It could not be written, or there is something else at `path`.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir() and not is_folder(target) and any(target.iterdir()):
        raise IsADirectoryError(f"`{path}` is a folder with something else in it: save to another path.")
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
    if target.is_dir():
        target.rename(folder.with_name(f"{folder.name}{_FORMER}"))
    elif target.exists():
        target.unlink()  # a file of before, whole; there is no way to swap the two in one step
    folder.rename(target)
    for former in target.parent.glob(
        f".raysgd-{glob.escape(target.name)}-????????.tmp{_FORMER}"
    ):  # of killed saves too
        shutil.rmtree(former, ignore_errors=True)
    flush_to_disk(target.parent)


def emptied(folder: Path) -> str:
    """The path of a folder for one attempt to write into it."""
    for entry in folder.iterdir():
        entry.unlink()
    return str(folder)


def finish(folder: Path, parts: Sequence[WrittenPart], rest: dict[str, Any]) -> None:
    """Writes the rest, when all ranks have written their parts.

    Raises:
        OSError: A part is not where the driver can see it, or the rest could not be written.
    """
    files = {name: facts for part in parts for name, facts in part.files.items()}
    missing = [name for name, (num_bytes, _) in files.items() if _size_of(folder / name) != num_bytes]
    if missing:
        raise OSError(
            f"{len(missing)} of {len(files)} files that workers wrote are not in `{folder.parent}` on the driver's "
            "machine. Workers on several nodes each write a part: save to a path that all nodes share, or pass "
            "`whole=True`, which gathers the whole state on the driver."
        )
    facts = {"version": FORMAT_VERSION, "tensors": [astuple(each) for each in parts[0].tensors], "files": files}
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


# ---------------------------------------------------------------------------------------------------------- index


def checked_files(files: Any) -> Files:
    """The files, if each is named as one directly in the folder.

    Raises:
        ValueError: One is not, or its size is no number.
    """
    require(type(files) is dict, "it has no list of files")
    for name, facts in files.items():
        require(type(name) is str and name not in ("", "..") and PurePath(name).name == name, "a file is elsewhere")
        require(type(facts) is tuple and len(facts) == 2 and _are_sizes(facts[:1]), "a file has no size")
    return dict(files)


def checked_tensors(entries: Any, files: Files) -> tuple[StoredTensor, ...]:
    """The tensors, as `dataclasses.astuple` wrote them, if all of each lies in the files.

    Raises:
        ValueError, TypeError: One does not, or together they are larger than the files.
    """
    tensors = tuple(_stored(files, *entry) for entry in entries)
    num_there = sum(size for size, _ in files.values())
    num_bytes = sum(math.prod(each.size) * each.dtype.itemsize for each in tensors)
    require(num_bytes <= num_there, "its tensors are larger than its files")
    num_read = sum(piece.num_bytes for each in tensors for piece in each.pieces)  # each is read whole
    require(num_read <= _MAX_REPETITION * num_there, "parts of its tensors lie in the same place many times")
    return tensors


def _stored(files: Files, path: Any, dtype: Any, size: Any, dim: Any, pieces: Any) -> StoredTensor:
    require(type(path) is tuple and 1 < len(path) <= _MAX_DIMS, "a tensor has no place")
    require(all(type(step) in (str, int) for step in path), "a tensor has no place")
    require(isinstance(dtype, torch.dtype), "a tensor is of no kind")
    require(type(size) is tuple and 0 < len(size) <= _MAX_DIMS and _are_sizes(size), "a tensor has no shape")
    require(math.prod(max(1, length) for length in size) < _MAX_SIZE, "a tensor has no shape")
    require(type(dim) is int and 0 <= dim < len(size), "a tensor is divided by no dimension")
    stored = StoredTensor(path, dtype, size, dim, tuple(TensorPiece(*piece) for piece in pieces))
    position = 0
    for piece in stored.pieces:
        _check_piece(stored, piece, files)
        require(piece.first == position, "the parts of a tensor do not follow each other")
        position += piece.length
    require(position == size[dim], "a part of a tensor is missing")
    return stored


def _check_piece(stored: StoredTensor, piece: TensorPiece, files: Files) -> None:
    require(_are_sizes((piece.first, piece.length, piece.start, piece.num_bytes)), "a part of a tensor has no size")
    require(piece.length > 0, "a part of a tensor is empty")
    require(type(piece.file) is str and piece.file in files, "a part of a tensor is in no file of the list")
    require(piece.start + piece.num_bytes <= files[piece.file][0], "a part of a tensor lies outside of its file")
    num_bytes = math.prod(stored.size_of(piece)) * stored.dtype.itemsize
    require(num_bytes <= piece.num_bytes, "a part of a tensor is larger than its place")


def _are_sizes(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and 0 <= number < _MAX_SIZE for number in numbers)
