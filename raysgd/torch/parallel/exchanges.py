"""Tracks whether the ranks' gradient communication in an optimizer step succeeded.

User code may catch the exception of a lost connection and continue. Later steps would then apply gradients that were
not averaged. Therefore, before a step counts as completed, `Exchanges.check` checks how its communication ended.

Each gradient all-reduce by `DistributedDataParallel` or Horovod reports how it ended. If no all-reduce was recorded in
a step, the step is valid only if the connections are still open. If a rank was lost *after* the step's communication,
the step is valid, because its gradients are the mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed import DistNetworkError

from raysgd.core.connections.torch import is_connection_error, is_group_broken, wait_for_collectives
from raysgd.trainer.worker.ledger import Ledger


class Exchanges:
    """Records how the gradient communication of the running optimizer step ends, within one worker group.

    Args:
        is_lost: Function that returns True if an exception means that a connection to another rank was lost.
        is_broken: Function that returns True if a connection to another rank has closed.

    Attributes:
        ledger: Measures the time spent in communication.
        num_made: Number of all-reduces in the running step. If the gradients of one backward pass of a model are sent
            in several all-reduces, only the last one counts. A caller that increments this number must run its
            all-reduce in a `with` block of `noting`.
    """

    def __init__(
        self,
        is_lost: Callable[[BaseException], bool] = is_connection_error,
        is_broken: Callable[[], bool] = is_group_broken,
    ) -> None:
        self._is_lost = is_lost
        self._is_broken = is_broken
        self.ledger = Ledger()
        self._error: BaseException | None = None
        self.num_made = 0

    def of_next_group(self) -> Exchanges:
        """Return a new `Exchanges`, without errors and counts, for the worker group that replaces this group."""
        return Exchanges(self._is_lost, self._is_broken)

    def track(self, future: Any, is_last: bool) -> Any:
        """Record how a running all-reduce ends. Return a future that completes or fails when the all-reduce does.

        Args:
            future: Future of the all-reduce.
            is_last: True if this is the last all-reduce in the backward pass of a model.
        """
        self.num_made += is_last
        # The last all-reduce starts when the backward pass has computed all gradients. From then on, this rank only
        # waits, so this time is measured as communication.
        is_awaited = is_last and self.ledger.begin_exchange()
        received = partial(self._received_last, is_awaited) if is_last else self._received
        return future.then(received)  # the backward pass waits for the returned future, and thus for the callback

    def _received_last(self, is_awaited: bool, future: Any) -> Any:
        received = self._received(future)
        if is_awaited:
            self.ledger.end_exchange()
        return received

    def _received(self, future: Any) -> Any:
        with self.noting():
            return future.value()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the step's first connection error in the `with` block. Every exception is raised again."""
        try:
            yield
        except Exception as error:  # communication raises different classes of exceptions in each backend
            if self._error is None and self._is_lost(error):
                self._error = error
            raise

    def wait(self) -> None:
        """Wait until the gradients are exchanged, and raise if that failed. Called before they are used in a step."""
        try:  # without `noting`, because this runs in every step
            wait_for_collectives()
        except DistNetworkError as error:
            self._error = self._error or error
            raise

    @property
    def has_broken(self) -> bool:
        """True if communication in the running step has failed because a connection was lost."""
        return self._error is not None

    def check(self) -> None:
        """Check the communication of the optimizer step that has ended, then prepare for the next step.

        Raises:
            Exception: The step's first connection error, as `noting` recorded it. Its class depends on the backend.
            DistNetworkError: No all-reduce was recorded in the step, and a connection to another rank has closed.
        """
        num_made, self.num_made = self.num_made, 0
        if self._error is not None:
            raise self._error
        if not num_made and self._is_broken():
            raise DistNetworkError("the connection to another rank ended, and user code went on with the next batch")


def completed(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future for gradients that are already averaged. A communication hook must return a future."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future
