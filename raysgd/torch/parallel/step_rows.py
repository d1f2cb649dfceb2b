"""`StepRows`: sends each rank's metrics to the other ranks of the worker group in each optimizer step.

The metrics of a rank, called its row, are sent together with the last gradients of a backward pass in the step's last
batch; see `raysgd.trainer.worker.data.rank_rows`. Rows are sent over the mesh, a set of direct connections between the
ranks that exists only with the gloo backend.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from raysgd.core.connections.group import Array
from raysgd.core.connections.torch import mesh_group
from raysgd.trainer.worker.data.epoch_run import METRICS, EpochRun
from raysgd.trainer.worker.data.rank_rows import Gather, RowExchange


class StepRows:
    """Sends this rank's metrics (its row) to the other ranks of the worker group before each optimizer step.

    The row contains the sums of this rank's metrics as they will be after the step. Therefore, the metrics of the
    step's batches are added to the sums even before the backward pass, as pending values.

    Args:
        row_exchange: Sends this rank's row and receives the rows of the other ranks.
        run: State of the current call. It has this rank's metrics, and stores the rows of all ranks.
    """

    def __init__(self, row_exchange: RowExchange, run: EpochRun) -> None:
        self._row_exchange, self._run = row_exchange, run

    def send(self, gather: Gather | None = None) -> None:
        """Exchange metrics (rows) with the other ranks.

        Args:
            gather: Function that sends a row and returns the rows of all ranks. Default: gather over the mesh.

        Raises:
            MeshBroken: A connection to another rank ended.
        """
        run = self._run
        run.rows.note(run.num_completed, self._row_exchange.exchange({METRICS: run.meters.tally()}, gather))


def gather_rows(size: int) -> Gather | None:
    """Return a function that sends this rank's row over the mesh and returns all ranks' rows. None if there is no mesh.

    A row is an array with one rank's metrics. If there is only one rank, the function returns that rank's row. The row
    is needed because other ranks may join later.

    Args:
        size: Number of ranks.
    """
    group = mesh_group()
    return _to_itself if size == 1 else None if group is None else group.gather


def _to_itself(row: Array) -> list[Array]:
    return [row]


def names_of_all(name: str) -> Collection[str] | None:
    """Send this rank's name to the other ranks and return all ranks' names. Return None if there is no mesh.

    All ranks must call this function together.
    """
    group = mesh_group()
    if group is None:
        return None
    return {row.tobytes().decode() for row in group.gather(np.frombuffer(name.encode(), np.uint8))}
