"""The fate of a step's exchanges with the other ranks, also where user code catches what they raise.

A `train_batch` that continues after any exception also continues after a lost connection. Each later step would have no
exchange and perhaps no update, and still count as done. So this is looked at before a step counts.

Every exchange of gradients that `DistributedDataParallel` or Horovod makes says how it ended. Where a step made none
that is known, it counts only if the connections are still open. A rank that was lost *after* the
step's exchanges leaves the step valid, with the gradients of all ranks.

With its last gradients a step exchanges the rows of the ranks, once, whatever else it exchanges; see
`raysgd.worker.data.rank_rows`. Rows go over the mesh of the ranks, so there are some where there is one: with gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.distributed import DistNetworkError

from raysgd.connections.group import Array, Group
from raysgd.connections.mesh.mesh import MeshBroken
from raysgd.connections.torch import exchanges_at_once, is_connection_error, is_group_broken
from raysgd.torch.parallel.batch import Batch
from raysgd.worker.data.epoch_run import METRICS, EpochRun
from raysgd.worker.data.rank_rows import Gather, RowExchange
from raysgd.worker.ledger import Ledger


class StepRows:
    """Tells all ranks of a leg what each of them has measured, before the optimizer steps.

    What they tell is what counts once the step is done: the metrics of a batch wait in the meters from before its
    backward pass.

    Args:
        exchange: Moves the rows.
        run: The call: has the meters of this rank, and keeps what all ranks have told.
    """

    def __init__(self, exchange: RowExchange, run: EpochRun) -> None:
        self._exchange, self._run = exchange, run

    def exchange(self, batch: Batch, gather: Gather | None = None) -> bool:
        """Exchange rows, unless that was done in this step, or the step goes on with other batches.

        Args:
            batch: The one that the replica is in.
            gather: As for `RowExchange.exchange`.

        Returns:
            Whether that was done now.

        Raises:
            MeshBroken: A connection to another rank ended.
        """
        if not batch.claim_rows():
            return False
        run = self._run
        run.rows.note(run.num_completed, self._exchange.exchange({METRICS: run.meters.tally()}, gather))
        return True

    def exchange_beside_gloo(self, batch: Batch) -> None:
        """Do the same while gloo exchanges gradients, in which other ranks may wait.

        Raises:
            DistNetworkError: A connection to another rank ended; those of gloo have to be ended, too.
        """
        try:
            self.exchange(batch)
        except MeshBroken as error:
            raise DistNetworkError(str(error)) from None  # else it would be taken for one that no rank waits in


def gather_rows(size: int) -> Gather | None:
    """Return what gathers the rows of so many ranks; None where there is no mesh.

    A rank that is left alone keeps its rows for others who may join it.
    """
    group = exchanges_at_once()
    return _to_itself if size == 1 else None if group is None else group.gather


def _to_itself(row: Array) -> list[Array]:
    return [row]


def names_of_all(name: str) -> Collection[str] | None:
    """Return what the ranks of the group are known by; None where there is no mesh. All ranks have to ask."""
    group = exchanges_at_once()
    if group is None:
        return None
    return {row.tobytes().decode() for row in group.gather(np.frombuffer(name.encode(), np.uint8))}


class Exchanges:
    """The exchanges of the running step, in one group.

    Args:
        is_lost: Whether an exception means that the group is broken.
        is_broken: Whether a connection of the group has ended.

    Attributes:
        ledger: Is told when exchanges begin and end.
    """

    def __init__(
        self,
        is_lost: Callable[[BaseException], bool] = is_connection_error,
        is_broken: Callable[[], bool] = is_group_broken,
    ) -> None:
        self._is_lost = is_lost
        self._is_broken = is_broken
        self.ledger: Ledger | None = None
        self._error: BaseException | None = None
        self._num_made = 0

    def of_next_group(self) -> Exchanges:
        """Return those of another group: what becomes of an exchange of this one is of no interest there."""
        return Exchanges(self._is_lost, self._is_broken)

    def track(self, future: Any, is_last: bool) -> Any:
        """Stand for an exchange that was begun; `is_last` says that the gradients of a model are complete with it."""
        self.count(is_last)
        is_awaited = is_last and self.ledger is not None and self.ledger.begin_exchange()  # the pass is over but for it
        received = partial(self._received_last, is_awaited) if is_last else self._received
        return future.then(received)  # not a callback beside it, which the backward pass would not wait for

    def timed(self, group: Group) -> AbstractContextManager[None]:
        """Count the time inside as an exchange that the backward pass waits for."""
        return nullcontext() if self.ledger is None else self.ledger.exchanging(group)

    def count(self, is_last: bool) -> None:
        """Count an exchange; one that raises by itself is not one, and what it raises is to be given to `note`."""
        self._num_made += is_last

    def _received_last(self, is_awaited: bool, future: Any) -> Any:
        received = self._received(future)
        if is_awaited:
            assert self.ledger is not None
            self.ledger.end_exchange()
        return received

    def _received(self, future: Any) -> Any:
        with self.noting():
            return future.value()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what an exchange raises in the block."""
        try:
            yield
        except Exception as error:  # each backend raises other classes
            self.note(error)
            raise

    def note(self, error: BaseException) -> None:
        """Keep the first exception that an exchange raised because the group is broken."""
        if self._error is None and self._is_lost(error):
            self._error = error

    @property
    def has_broken(self) -> bool:
        """True if an exchange of the running step has failed because the group is broken."""
        return self._error is not None

    def check(self) -> None:
        """End a step; raise if it cannot count because the group broke in it.

        Raises:
            RuntimeError: One that `is_lost` takes for a lost connection.
        """
        num_made, self._num_made = self._num_made, 0
        if self._error is not None:
            raise self._error
        if not num_made and self._is_broken():
            raise DistNetworkError("the connection to another rank ended, and user code went on with the next batch")


def completed(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return what a communication hook returns where nothing is under way."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def step_only_where(optimizer: Any, counts: Callable[[Any], bool]) -> None:
    """Let an optimizer step only where the step counts, in place, so that there is no other way to step it.

    Args:
        optimizer: The optimizer; other objects with a `step` will do.
        counts: Is given the closure; returns whether to step.
    """
    own: Any = optimizer.step  # perhaps that of a scheduler, or one with scaled gradients

    @functools.wraps(getattr(own, "__func__", own))
    def step(_: Any, closure: Any = None) -> Any:
        if not counts(closure):
            return None
        return own() if closure is None else own(closure)

    optimizer.step = MethodType(step, optimizer)  # schedulers wrap methods only
