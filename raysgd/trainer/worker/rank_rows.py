"""Rows: the metrics that each rank sends to all others in each step, so that those of a lost worker are not lost.

In every step, before the optimizer steps, each rank sends all other ranks the metrics that it has measured so far. This
message is called the rank's row. It has values, and a layout that says what the values mean. A rank sends its layout
only when the layout changes, which is rare.

A rank that completes a step has received the rows of all ranks for that step. If a worker is lost, the surviving ranks
have its metrics from its last row. Ranks also keep the rows of the step before, because they continue from that step if
the latest step is interrupted.

`RowExchange` sends the rows while one group of workers runs a training call. `RankRows` stores the rows during the
whole call, in which the group may change. ADR 1 gives the reasons.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raysgd.core.connections.group import Array, Gather

# The start of an encoded row: the number of bytes in the row, the number of values, and the number of bytes of the
# layout, which follows the values.
_HEAD = struct.Struct("<IIQ")
_FIRST_CAPACITY = 512


class Row(NamedTuple):
    """The metrics that one rank sends to all other ranks in one step.

    Attributes:
        layout: Says what the values mean, such as the names of the metrics.
        numbers: The values.
    """

    layout: Any
    numbers: Array


class RowExchange:
    """Sends this rank's row of metrics to all ranks in the group of workers, and receives the rows of the other ranks.

    All ranks must call `exchange` together.

    Args:
        name: Name of this rank. Unlike its number, the name stays the same in later groups.
        gather: All-gather function. It takes this rank's array, and returns the arrays of all ranks, which have the
            same shape.
    """

    def __init__(self, name: str, gather: Gather) -> None:
        self.name, self.gather = name, gather
        self._capacity = _FIRST_CAPACITY
        self._told: Any = None
        self._layouts: dict[int, Any] = {}

    def exchange(self, layout: Any, numbers: Sequence[float], gather: Gather | None = None) -> dict[str, Row]:
        """Send a row to all ranks. Return the rows of all ranks, by rank name.

        Args:
            layout: The layout of this rank's row.
            numbers: The values of this rank's row.
            gather: All-gather function to use instead of the default, for example one that sends other data together
                with the row. If the rows turn out to be too long for it, they are sent again with the default.
        """
        own = self._encoded((self.name, layout), numbers)
        received = self._gathered(own, gather or self.gather)
        heads = _heads_of(received)
        while (needed := max(num_bytes for num_bytes, *_ in heads)) > self._capacity:
            # All ranks compute the new capacity from the same rows, so it is the same on all ranks.
            self._capacity = 1 << (needed - 1).bit_length()
            received = self._gathered(own, self.gather)
            heads = _heads_of(received)
        return dict(map(self._decoded, itertools.count(), received, heads))

    def _encoded(self, layout: Any, numbers: Sequence[float]) -> bytes:
        told = b"" if layout == self._told else pickle.dumps(layout)
        self._told = layout
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
        name, layout = self._layouts[rank]
        return name, Row(layout, row[_HEAD.size : end].view("<f8"))


def _heads_of(rows: Sequence[Array]) -> list[tuple[int, int, int]]:
    return [_HEAD.unpack_from(row.data) for row in rows]


class RankRows:
    """Stores the last metrics that each rank has sent in a training call, even if the group of workers changes.

    Attributes:
        name: Name of this rank.
        lost: The metrics of lost ranks, by rank name, as of the last completed step.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: dict[str, Any] = {}
        self._told: dict[int, Mapping[str, Any]] = {}  # of the last two steps, by the number of steps before each

    def note(self, num_steps: int, rows: Mapping[str, Any]) -> None:
        """Store the rows that the ranks sent in one step.

        Args:
            num_steps: Number of steps that were completed before that step.
            rows: The rows by rank name.
        """
        latest = [(before, told) for before, told in self._told.items() if before != num_steps][-1:]
        self._told = dict([*latest, (num_steps, rows)])

    def forget(self, num_steps: int) -> None:
        """Discard the rows that the ranks sent after `num_steps` steps were completed."""
        self._told.pop(num_steps, None)

    def as_of(self, num_steps: int) -> Mapping[str, Any]:
        """Return the last rows that the ranks sent in the first `num_steps` steps of the call, by rank name.

        Return an empty mapping if no such rows are stored.
        """
        return next((rows for before, rows in reversed(self._told.items()) if before < num_steps), {})

    def keep_lost(self, num_steps: int, rows: Mapping[str, Any], present: Collection[str]) -> None:
        """Keep the last rows of lost ranks, because a new group of workers continues the call.

        Args:
            num_steps: Number of completed steps.
            rows: The rows of all ranks after these steps, by rank name.
            present: Names of the ranks in the new group. Ranks that are not among them are lost.
        """
        self._told.clear()
        self.note(num_steps - 1, rows)
        self.lost.update({name: row for name, row in rows.items() if name not in present})
