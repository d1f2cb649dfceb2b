"""The exchange of rows in each optimizer step, with its last gradients: once, whatever else the step exchanges.

Rows go over the mesh of the ranks, so they are exchanged where there is one: with gloo. See
`raysgd.worker.data.rank_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
from torch.distributed import DistNetworkError

from raysgd.connections.group import Array
from raysgd.connections.mesh.mesh import MeshBroken
from raysgd.connections.torch import exchanges_at_once
from raysgd.torch.parallel.step import BatchStep
from raysgd.worker.data.rank_rows import Gather, Part, Row, RowExchange

ReadParts = Callable[[], Mapping[str, Part]]
NoteRows = Callable[[Mapping[str, Row]], None]


class StepRows:
    """Exchanges the rows of a replica with those of the others.

    Args:
        step: The step that the replica is in.
        is_used: Whether rows are exchanged at all; all ranks have to say the same.

    Attributes:
        is_used: The same.
    """

    def __init__(self, step: BatchStep, is_used: bool) -> None:
        self._step, self.is_used = step, is_used
        self._gather: Gather | None = None
        self._exchange: RowExchange | None = None
        self.close_call()

    def open_call(self, name: str, size: int, read: ReadParts, note: NoteRows) -> None:
        """Begin a call, as all ranks do.

        Args:
            name: What this rank is known by.
            size: How many ranks there are. One that is left alone keeps its rows for others who may join it.
            read: Returns what it tells.
            note: Called with what all ranks have told, before the step is taken.
        """
        group = exchanges_at_once()
        gather = _to_itself if size == 1 else None if group is None else group.gather
        if gather != self._gather:
            self._gather, self._exchange = gather, None if gather is None else RowExchange(name, gather)
        self._read, self._note, self._is_open = read, note, self.is_used

    def close_call(self) -> None:
        """End a call, in whatever way."""
        self._is_open = False

    def exchange(self, gather: Gather | None = None) -> bool:
        """Exchange rows, unless that was done in this step, or the step goes on with other batches.

        Args:
            gather: As for `RowExchange.exchange`.

        Returns:
            Whether that was done now.

        Raises:
            MeshBroken: A connection to another rank ended.
        """
        if self._exchange is None or not self._is_open or not self._step.begin_exchange():
            return False
        self._note(self._exchange.exchange(self._read(), gather))
        return True

    def exchange_beside_gloo(self) -> None:
        """Do the same while gloo exchanges gradients, in which other ranks may wait.

        Raises:
            DistNetworkError: A connection to another rank ended; those of gloo have to be ended, too.
        """
        try:
            self.exchange()
        except MeshBroken as error:
            raise DistNetworkError(str(error)) from None  # else it would be taken for one that no rank waits in


def _to_itself(row: Array) -> list[Array]:
    return [row]


def names_of_all(name: str) -> Collection[str] | None:
    """Return what the ranks of the group are known by; None where there is no mesh. All ranks have to ask."""
    group = exchanges_at_once()
    if group is None:
        return None
    return {row.tobytes().decode() for row in group.gather(np.frombuffer(name.encode(), np.uint8))}
