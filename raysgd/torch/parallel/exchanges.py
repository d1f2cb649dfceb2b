"""Tracks whether a step's communication with the other ranks succeeded, and sends metrics with it.

User code may catch any exception, so it may continue after a lost connection. Later steps would then apply gradients
that were not averaged. So before a step counts as completed, `Exchanges.check` checks how its communication ended.

Each gradient all-reduce by `DistributedDataParallel` or Horovod reports how it ended. If no all-reduce was recorded in
a step, the step counts only if the connections are still open. If a rank was lost *after* the step's communication, the
step is valid, because it has the gradients of all ranks.

With its last gradients, a step also exchanges rows. A row contains one rank's metrics; see
`raysgd.trainer.worker.data.rank_rows`. Rows are sent over the mesh, direct connections between the ranks that exist
only with the gloo backend.
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

from raysgd.core.connections.group import Array, Group
from raysgd.core.connections.mesh.mesh import MeshBroken
from raysgd.core.connections.torch import exchanges_at_once, is_connection_error, is_group_broken
from raysgd.torch.parallel.batch import Batch
from raysgd.trainer.worker.data.epoch_run import METRICS, EpochRun
from raysgd.trainer.worker.data.rank_rows import Gather, RowExchange
from raysgd.trainer.worker.ledger import Ledger


class StepRows:
    """Exchanges metrics between the ranks of one worker group, before each optimizer step.

    A rank's row contains the sums of its metrics as they will be after the step. They include the metrics of the step's
    batches, which were added to the meters as pending before the backward pass. Meters accumulate metrics.

    Args:
        exchange: Sends this rank's row and receives the rows of the other ranks.
        run: State of the current call. It has this rank's meters, and stores the rows of all ranks.
    """

    def __init__(self, exchange: RowExchange, run: EpochRun) -> None:
        self._exchange, self._run = exchange, run

    def exchange(self, batch: Batch, gather: Gather | None = None) -> bool:
        """Exchange rows, once per optimizer step. Called with the last gradients of a backward pass.

        Do nothing if this step's rows were already exchanged, or if the step has more batches to come.

        Args:
            batch: Batch whose gradients are being sent.
            gather: Function that sends a row and returns the rows of all ranks. Default: gather over the mesh.

        Returns:
            True if rows were exchanged now.

        Raises:
            MeshBroken: A connection to another rank ended.
        """
        if not batch.claim_rows():
            return False
        run = self._run
        run.rows.note(run.num_completed, self._exchange.exchange({METRICS: run.meters.tally()}, gather))
        return True

    def exchange_beside_gloo(self, batch: Batch) -> None:
        """Exchange rows over the mesh while gloo all-reduces gradients.

        Raises:
            DistNetworkError: A connection to another rank ended. Other ranks may be waiting in gloo, so its connections
                must be closed, too.
        """
        try:
            self.exchange(batch)
        except MeshBroken as error:
            raise DistNetworkError(str(error)) from None  # `MeshBroken` would leave gloo's connections open


def gather_rows(size: int) -> Gather | None:
    """Return the function that sends a row and returns the rows of all `size` ranks; None if there is no mesh.

    For a single rank, return a function that returns only the given row. The rank still records rows, because other
    ranks may join later.
    """
    group = exchanges_at_once()
    return _to_itself if size == 1 else None if group is None else group.gather


def _to_itself(row: Array) -> list[Array]:
    return [row]


def names_of_all(name: str) -> Collection[str] | None:
    """Send this rank's name to the group and return all ranks' names. Return None without a mesh of direct connections.

    All ranks must call this.
    """
    group = exchanges_at_once()
    if group is None:
        return None
    return {row.tobytes().decode() for row in group.gather(np.frombuffer(name.encode(), np.uint8))}


class Exchanges:
    """Tracks the gradient communication of the running step in one worker group.

    Args:
        is_lost: Returns True if an exception means that the group is broken.
        is_broken: Returns True if a connection of the group has closed.

    Attributes:
        ledger: Measures the time spent in communication; None to measure nothing.
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
        """Return a new tracker, without errors or counts, for the worker group that replaces this group."""
        return Exchanges(self._is_lost, self._is_broken)

    def track(self, future: Any, is_last: bool) -> Any:
        """Track an all-reduce that was started. Return a future that completes or fails with the all-reduce.

        Args:
            future: Future of the all-reduce.
            is_last: True if it is the last all-reduce of a model's backward pass.
        """
        self.count(is_last)
        # Once the last all-reduce has started, nothing is left to compute, so the wait for it is measured as
        # communication.
        is_awaited = is_last and self.ledger is not None and self.ledger.begin_exchange()
        received = partial(self._received_last, is_awaited) if is_last else self._received
        return future.then(received)  # the backward pass waits for the returned future, and thus for the callback

    def timed(self, group: Group) -> AbstractContextManager[None]:
        """Return a context manager that measures the time in its `with` block as communication."""
        return nullcontext() if self.ledger is None else self.ledger.exchanging(group)

    def count(self, is_last: bool) -> None:
        """Count an all-reduce if it is the last of a model's backward pass. If it fails, call `note` as well."""
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
        """Record any exception that communication raises in the `with` block, and raise it again."""
        try:
            yield
        except Exception as error:  # each backend raises different classes
            self.note(error)
            raise

    def note(self, error: BaseException) -> None:
        """Store an exception that communication raised, if it is the first to mean that the group is broken."""
        if self._error is None and self._is_lost(error):
            self._error = error

    @property
    def has_broken(self) -> bool:
        """True if communication of the running step has failed because the group is broken."""
        return self._error is not None

    def check(self) -> None:
        """Raise if communication failed in the step that has ended; otherwise, prepare for the next step.

        Raises:
            RuntimeError: A connection was lost during the step. `is_lost` returns True for this exception.
        """
        num_made, self._num_made = self._num_made, 0
        if self._error is not None:
            raise self._error
        if not num_made and self._is_broken():
            raise DistNetworkError("the connection to another rank ended, and user code went on with the next batch")


def completed(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future for gradients that are already averaged. A communication hook must return a future."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def step_only_where(optimizer: Any, counts: Callable[[Any], bool]) -> None:
    """Replace an optimizer's `step` with a method that calls the original `step` only if `counts` returns True.

    Args:
        optimizer: Optimizer, or another object with a `step` method.
        counts: Called with the closure that was passed to `step`, or None. Returns True to step.
    """
    own: Any = optimizer.step  # may be a replacement that a scheduler or a gradient scaler has set

    @functools.wraps(getattr(own, "__func__", own))
    def step(_: Any, closure: Any = None) -> Any:
        if not counts(closure):
            return None
        return own() if closure is None else own(closure)

    optimizer.step = MethodType(step, optimizer)  # a bound method, because schedulers cannot wrap a plain function
