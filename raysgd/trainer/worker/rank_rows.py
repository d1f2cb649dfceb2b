"""Rows: the metrics that the ranks send each other in each step.

The metrics of a lost worker must not be lost with it. So in every step, before the optimizer steps, each rank sends all
other ranks the metrics that it has measured so far. This message is called the rank's row. It has values, and a layout
that says what the values mean. A rank sends its layout only when the layout changes, which is rare.

A rank that completes a step has received the rows of all ranks for that step. If a worker is lost, the surviving ranks
have its metrics from its last row. Ranks also keep the rows of the step before, because they continue from that step if
the latest step is interrupted.

`RowExchange` encodes the rows while one group of workers runs a training call. `RankRows` stores the rows during the
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

_HEAD = struct.Struct("<I")  # the start of an encoded row: the number of bytes in the row
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
    """Encodes this rank's row of metrics for the other ranks in the group of workers, and decodes the rows of all.

    All ranks must send their rows together.

    Args:
        call: The `TrainingCall`, which has this rank's metrics and stores the rows of all ranks.
        gather: All-gather function. It takes this rank's array, and returns the arrays of all ranks, which have the
            same shape.
    """

    def __init__(self, call: Any, gather: Gather) -> None:
        self._call, self.gather = call, gather
        self._capacity = _FIRST_CAPACITY
        self._own = b""
        self._told: Any = None
        self._layouts: dict[int, Any] = {}

    def row_to_send(self) -> Array:
        """Return the sums of this rank's metrics, as they will be after the step. The caller sends them to all ranks.

        The metrics of the step's batches are in the sums even before the backward pass, as pending values.
        """
        layout, numbers = self._call.meters.tally()
        told = None if layout == self._told else (self._call.rows.name, layout)
        self._told = layout
        own = pickle.dumps((told, struct.pack(f"<{len(numbers)}d", *numbers)))
        self._own = _HEAD.pack(_HEAD.size + len(own)) + own
        return self._padded()

    def take_rows(self, received: Sequence[Array]) -> None:
        """Store the rows that all ranks have sent. If one was too long, all ranks send their rows again."""
        while (needed := max(_HEAD.unpack_from(row.data)[0] for row in received)) > self._capacity:
            # All ranks compute the new capacity from the same rows, so it is the same on all ranks.
            self._capacity = 1 << (needed - 1).bit_length()
            received = self.gather(self._padded())
        rows = dict(map(self._decoded, itertools.count(), received))
        self._call.rows.note(self._call.num_batches_completed, rows)

    def _padded(self) -> Array:
        return np.frombuffer(self._own[: self._capacity].ljust(self._capacity, b"\0"), np.uint8)

    def _decoded(self, rank: int, row: Array) -> tuple[str, Row]:
        told, numbers = pickle.loads(row[_HEAD.size :].data)
        if told is not None:
            self._layouts[rank] = told
        name, layout = self._layouts[rank]
        return name, Row(layout, np.frombuffer(numbers, "<f8"))


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
