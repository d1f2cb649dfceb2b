"""`PeerMetrics`: sends this rank's metrics to the other ranks in each step, so that they are not lost with the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.core.connections.torch import mesh_group
from raysgd.trainer.worker.data.epoch_run import METRICS
from raysgd.trainer.worker.data.rank_rows import Gather, RowExchange

# Sends this rank's metrics (its row) and receives those of the other ranks. The argument gathers rows; None: the mesh.
Share = Callable[[Gather | None], None]


class PeerMetrics:
    """Sends this rank's metrics (its row) to the other ranks in each step of a call, along with the gradients."""

    def __init__(self) -> None:
        self._latest: tuple[Gather, RowExchange] | None = None  # for the current worker group; None until needed

    def sharing(self, call: Any, size: int) -> Share | None:
        """Return the function that sends this rank's metrics to the other ranks in each step of a call.

        The metrics are the sums as they will be after the step. Therefore, the metrics of the step's batches are added
        to the sums even before the backward pass, as pending values.

        Return None if there is no mesh to send them over.

        Args:
            call: The `TrainingCall`. It has this rank's metrics, and stores the rows of all ranks.
            size: Number of ranks.
        """
        group, name = mesh_group(), call.rows.name
        if group is None and size > 1:
            return None
        gather = _to_itself if group is None or size == 1 else group.gather
        if self._latest is None or self._latest[0] != gather or self._latest[1].name != name:
            self._latest = gather, RowExchange(name, gather)
        exchange = self._latest[1].exchange
        return lambda gather: call.rows.note(call.num_completed, exchange({METRICS: call.meters.tally()}, gather))


def _to_itself(row: Any) -> list[Any]:
    return [row]  # a rank alone keeps its row, because others may join later
