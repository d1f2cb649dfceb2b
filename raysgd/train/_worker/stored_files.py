"""The files of a checkpoint that several ranks store in one folder, and where those go whose names are taken."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from raysgd.storage import Folder

_PIECE_BYTES = 1 << 20


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the names of all files in a folder, with slashes."""
    found = (Path(above, name) for above, _, names in os.walk(folder, followlinks=True) for name in names)
    return tuple(path.relative_to(folder).as_posix() for path in found)


def taken_names(names: Mapping[int, Collection[str]]) -> dict[int, tuple[str, ...]]:
    """Return the names of each rank that a lower one uses too.

    >>> taken_names({0: ["model", "rank_0"], 1: ["model", "rank_1"], 2: ["rank_2"]})
    {0: (), 1: ('model',), 2: ()}
    """
    below: set[str] = set()
    taken = {}
    for rank in sorted(names):
        taken[rank] = tuple(name for name in names[rank] if name in below)
        below.update(names[rank])
    return taken


def store_beside(source: Path, target: Folder, rank: int, taken: Collection[str]) -> list[str]:
    """Store a folder where lower ranks have stored theirs.

    Args:
        source: The folder.
        target: Where it goes.
        rank: Whose folder it is.
        taken: Names in it that lower ranks use too. Files with the same content are not stored again.

    Returns:
        The names of those with other content, which are stored under a name with the rank, such as `model.rank_1`.
    """
    own = names_in(source)
    moved = [name for name in taken if not _is_same(source / name, target, name)]
    target.upload(source, {**dict.fromkeys(taken), **{name: _place_of(name, rank, own) for name in moved}})
    return moved


def _place_of(name: str, rank: int, own: Collection[str]) -> str:
    place = f"{name}.rank_{rank}"
    return _place_of(place, rank, own) if place in own else place


def _is_same(path: Path, folder: Folder, name: str) -> bool:
    try:
        with open(path, "rb") as one, folder.reading(name) as other:
            return all(a == b for a, b in zip_longest(_pieces(one), _pieces(other)))
    except FileNotFoundError:  # the other rank is not there yet
        return False


def _pieces(file: IO[bytes]) -> Any:
    return iter(lambda: file.read(_PIECE_BYTES), b"")
