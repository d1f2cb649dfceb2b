"""In every step, each rank sends its metrics so far, called its row, to all other ranks before the optimizer steps.

A row has named parts. Each part has values and a layout that says what the values mean. Layouts seldom change, so a
rank sends its layout only when it changes. A rank that completes a step has received all ranks' rows for that step, so
every survivor knows what a lost rank had measured. It also keeps the previous step's rows, because the ranks continue
from the previous step if the latest step is interrupted.

`RowExchange` sends rows within one group. `RankRows` stores them across all groups of one call. ADR 1 gives the
reasons.
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
"""A layout and the values it describes."""

Array = np.ndarray[Any, np.dtype[Any]]
Gather = Callable[[Array], list[Array]]

_HEAD = struct.Struct("<IIQ")  # bytes in the row, number of values, bytes in the layout that follows the values
_FIRST_CAPACITY = 512


class Row(NamedTuple):
    """The metrics that one rank sends to all other ranks in one step.

    Attributes:
        parts: Name, layout and number of values of each part.
        numbers: The values of all parts, concatenated.
    """

    parts: tuple[tuple[str, Any, int], ...]
    numbers: Array

    def part(self, name: str) -> Part | None:
        """Return the part `name`; None if the row has no such part."""
        start = 0
        for each, layout, length in self.parts:
            if each == name:
                return layout, self.numbers[start : start + length].tolist()
            start += length
        return None


class RowExchange:
    """Sends this rank's row of metrics to all ranks in a group, and receives theirs.

    All ranks must call `exchange` together.

    Args:
        name: Name of this rank, which stays the same in later groups.
        gather: All-gather: takes this rank's array and returns the arrays of all ranks. All arrays have the same shape.
    """

    def __init__(self, name: str, gather: Gather) -> None:
        self._name, self._gather = name, gather
        self._capacity = _FIRST_CAPACITY
        self._told: Any = None
        self._layouts: dict[int, Any] = {}

    def exchange(self, parts: Mapping[str, Part], gather: Gather | None = None) -> dict[str, Row]:
        """Send a row with these parts to all ranks. Return the rows of all ranks, by rank name.

        Args:
            parts: The parts by name.
            gather: All-gather to use first instead of the default, for example an all-gather that sends other data
                along with the row.
        """
        own = self._encoded(parts)
        received = self._gathered(own, gather or self._gather)
        heads = _heads_of(received)
        while (needed := max(num_bytes for num_bytes, *_ in heads)) > self._capacity:
            # Computed from all rows, so all ranks get the same capacity.
            self._capacity = 1 << (needed - 1).bit_length()
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
    """Stores all ranks' rows of metrics in a call, by rank name, even if the worker group changes during the call.

    Attributes:
        name: Name of this rank.
        lost: Rows or metrics of lost ranks, each as of the last step that counts.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: dict[str, Any] = {}
        self._told: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=2)

    def note(self, num_steps: int, rows: Mapping[str, Any]) -> None:
        """Store the rows that the ranks sent in the step after `num_steps` completed steps."""
        if self._told and self._told[-1][0] == num_steps:
            self._told.pop()
        self._told.append((num_steps, rows))

    def as_of(self, num_steps: int) -> Mapping[str, Any]:
        """Return the rows sent in the last of the first `num_steps` steps, by rank name; empty if unknown."""
        return next((rows for before, rows in reversed(self._told) if before < num_steps), {})

    def settle(self, num_steps: int, rows: Mapping[str, Any], present: Collection[str]) -> None:
        """Continue in a new group after `num_steps` steps. Keep the rows of ranks not in `present`, which are lost."""
        self._told.clear()
        self.note(num_steps - 1, rows)
        self.lost.update({name: row for name, row in rows.items() if name not in present})
