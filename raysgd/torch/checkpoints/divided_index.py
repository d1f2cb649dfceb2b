"""The index of a folder of divided models: each tensor's kind and size, and which file has which part of it.

It is plain data in the file with everything but tensors, so the strict reader reads it and a checksum covers it. It
names all that is read of the folder, and its numbers are compared with the sizes of the files before anything is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch

from raysgd._reading.strict_reading import require

Path_ = tuple[str | int, ...]
"""The place of a tensor in a state."""

Files = Mapping[str, tuple[int, str]]
"""Number of bytes and checksum of each file, by its name in the folder."""

_MAX_DIMS = 64
_MAX_SIZE = 2**62
_MAX_REPETITION = 16
"""The number of times that all files may be read, at most: several parts may lie in the same place."""


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
