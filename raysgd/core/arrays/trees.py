"""Pure functions on nested tuples and dicts of arrays, the structures that `predict` accepts and returns.

Everything except a tuple or dict is a leaf. A list is a leaf that has one entry per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np


def mapped(tree: Any, function: Callable[[Any], Any], *, in_lists: bool = False) -> Any:
    """Return a copy of a nested structure with `function` applied to each leaf.

    With `in_lists=True`, lists are not leaves, but parts of the structure.
    """
    if isinstance(tree, Mapping):
        return {name: mapped(part, function, in_lists=in_lists) for name, part in tree.items()}
    if isinstance(tree, tuple) or (in_lists and isinstance(tree, list)):
        parts = [mapped(part, function, in_lists=in_lists) for part in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return type(tree)(parts) if in_lists else tuple(parts)
    return function(tree)


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each leaf of a nested structure. A name looks like `['box'][0]`.

    Each name starts with `name`. If the structure itself is a leaf, its name is `name`.
    """
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from leaves(part, f"{name}[{key!r}]")
    elif isinstance(tree, tuple):
        for index, part in enumerate(tree):
            yield from leaves(part, f"{name}[{index}]")
    else:
        yield name, tree


def nbytes(tree: Any) -> int:
    """Return the total size in bytes of all arrays in a nested structure. A value without a size counts as 8 bytes.

    >>> nbytes({"rows": [np.zeros(1000), np.zeros(10)]})
    8080
    """
    if isinstance(tree, list):
        return sum(nbytes(part) for part in tree)
    return sum(nbytes(leaf) if isinstance(leaf, list) else int(getattr(leaf, "nbytes", 8)) for _, leaf in leaves(tree))


def rows_of(leaf: Any) -> int | None:
    """Return the number of rows of an array or list. Return None for a scalar."""
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(leaf) if isinstance(leaf, list) else None


def joined(trees: Sequence[Any]) -> Any:
    """Concatenate the rows of several nested structures of arrays. All must have the same structure.

    Raises:
        ValueError: The structures differ.
    """
    first = trees[0]
    if isinstance(first, Mapping):
        _check_alike(trees, lambda tree: isinstance(tree, Mapping) and sorted(map(str, tree)))
        return {name: joined([tree[name] for tree in trees]) for name in first}
    if isinstance(first, tuple):
        _check_alike(trees, lambda tree: isinstance(tree, tuple) and len(tree))
        parts = [joined(list(column)) for column in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, list):
        _check_alike(trees, lambda tree: isinstance(tree, list))
        return [row for tree in trees for row in tree]
    _check_alike(trees, lambda tree: tuple(tree.shape[1:]) if isinstance(tree, np.ndarray) else type(tree))
    return np.concatenate(trees)


def _check_alike(trees: Sequence[Any], kind_of: Callable[[Any], Any]) -> None:
    kinds = [kind_of(tree) for tree in trees]
    other = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
    if other != kinds[0]:
        raise ValueError(
            f"The outputs of two batches cannot be joined: one has {kinds[0]} where another has {other}. Return "
            "outputs of the same structure from `predict_batch`, for example padded to one length, or pass "
            "`streaming=True` to get them batch by batch."
        )


def own(leaf: Any) -> Any:
    """Return an array that the caller may modify.

    A read-only array, such as an array from Ray's object store, is copied. Any other array is returned unchanged.
    """
    return leaf.copy() if isinstance(leaf, np.ndarray) and not leaf.flags.writeable else leaf
