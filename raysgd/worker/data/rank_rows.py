"""Rows: what each rank tells all others in every step, before the optimizer steps.

A row has named parts, each of them numbers with a layout: what they mean. Layouts seldom change, so they travel only
when they do. A rank that completes a step has the rows of all ranks as of that step, and keeps those of the step
before, too: a step may break off, and then the ranks go on from the one before. So what a lost rank had told is known
to all that live.

`RowExchange` moves rows within one group, `RankRows` keeps them over the groups of one call. Why: ADR 1.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Part = tuple[Any, Sequence[float]]
"""The layout of some numbers, and the numbers."""

Array = np.ndarray[Any, np.dtype[Any]]
Gather = Callable[[Array], list[Array]]

_HEAD = struct.Struct("<IIQ")  # how many bytes a row has; how many numbers; how many bytes of a layout follow them
_FIRST_CAPACITY = 512


class Row(NamedTuple):
    """A row of sums that one rank told.

    Attributes:
        parts: The name of each part, its layout, and how many numbers it has.
        numbers: The numbers of all parts, one part behind the other.
    """

    parts: tuple[tuple[str, Any, int], ...]
    numbers: Array

    def part(self, name: str) -> Part | None:
        """Return one part; None if it has none of that name."""
        start = 0
        for each, layout, length in self.parts:
            if each == name:
                return layout, self.numbers[start : start + length].tolist()
            start += length
        return None


class RowExchange:
    """One rank's side of the exchange in one group. All ranks make the same exchanges.

    Args:
        name: What this rank is known by, in whatever group.
        gather: Returns the arrays of all ranks of the group, which all have one shape.
    """

    def __init__(self, name: str, gather: Gather) -> None:
        self._name, self._gather = name, gather
        self._capacity = _FIRST_CAPACITY
        self._told: Any = None
        self._layouts: dict[int, Any] = {}

    def exchange(self, parts: Mapping[str, Part], gather: Gather | None = None) -> dict[str, Row]:
        """Tell all ranks these parts; return what each of them tells, by its name.

        Args:
            parts: The numbers and their layouts.
            gather: What does the same with something else in addition.
        """
        own = self._encoded(parts)
        received = self._gathered(own, gather or self._gather)
        heads = _heads_of(received)
        while (needed := max(num_bytes for num_bytes, *_ in heads)) > self._capacity:
            self._capacity = 1 << (needed - 1).bit_length()  # all ranks come to the same
            received = self._gathered(own, self._gather)
            heads = _heads_of(received)
        return dict(map(self._decoded, itertools.count(), received, heads))

    def _encoded(self, parts: Mapping[str, Part]) -> bytes:
        layout = self._name, tuple((name, layout, len(numbers)) for name, (layout, numbers) in parts.items())
        told = b"" if layout == self._told else pickle.dumps(layout)
        self._told = layout
        numbers = [number for _, each in parts.values() for number in each]
        body = struct.pack(f"<{len(numbers)}d", *numbers) + told
        return _HEAD.pack(_HEAD.size + len(body), len(numbers), len(told)) + body

    def _gathered(self, row: bytes, gather: Gather) -> list[Array]:
        room = np.zeros(self._capacity, np.uint8)
        fitting = row[: self._capacity]
        room[: len(fitting)] = np.frombuffer(fitting, np.uint8)
        return gather(room)

    def _decoded(self, rank: int, row: Array, head: tuple[int, int, int]) -> tuple[str, Row]:
        _, num_numbers, num_bytes = head
        end = _HEAD.size + 8 * num_numbers
        if num_bytes:
            self._layouts[rank] = pickle.loads(row[end : end + num_bytes].data)
        name, parts = self._layouts[rank]
        return name, Row(parts, row[_HEAD.size : end].view("<f8"))


def _heads_of(rows: Sequence[Array]) -> list[tuple[int, int, int]]:
    return [_HEAD.unpack_from(row.data) for row in rows]


class RankRows:
    """The rows that the ranks of a call have told, by their names, whatever group they were in then.

    Attributes:
        name: What this rank is known by.
        lost: What ranks had told that are gone, as of their last step that counts.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: dict[str, Any] = {}
        self._told: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=2)

    def note(self, num_steps: int, rows: Mapping[str, Any]) -> None:
        """Note what was told in the step that follows `num_steps` completed ones."""
        if self._told and self._told[-1][0] == num_steps:
            self._told.pop()
        self._told.append((num_steps, rows))

    def as_of(self, num_steps: int) -> Mapping[str, Any]:
        """Return what was told in the last of so many completed steps, by name; nothing if that is not known."""
        return next((rows for before, rows in reversed(self._told) if before < num_steps), {})

    def settle(self, num_steps: int, rows: Mapping[str, Any], present: Collection[str]) -> None:
        """Go on in another group, after `num_steps` steps: ranks that are not `present` in it are lost."""
        self._told.clear()
        self.note(num_steps - 1, rows)
        self.lost.update({name: row for name, row in rows.items() if name not in present})
