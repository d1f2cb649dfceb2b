"""The fate of a step's exchanges with the other ranks, also where user code catches what they raise.

A `train_batch` that continues after any exception also continues after a lost connection. Each later step would have no
exchange and perhaps no update, and still count as done. So this is looked at before a step counts.

Every exchange of gradients that `DistributedDataParallel` or Horovod makes says how it ended. Where a step made none
that is known, it counts only if the connections are still open. A rank that was lost *after* the
step's exchanges leaves the step valid, with the gradients of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.distributed import DistNetworkError

from raysgd.connections.group import Group
from raysgd.connections.torch import is_connection_error, is_group_broken
from raysgd.torch.parallel.stream_clock import StreamClock
from raysgd.worker.ledger import Ledger


class Exchanges:
    """The exchanges of the running step.

    Args:
        is_lost: Whether an exception means that the group is broken.
        is_broken: Whether a connection of the group has ended.

    Attributes:
        ledger: Is told when exchanges begin and end.
        clock: The same, where it is needed how long a GPU computes in between.
    """

    def __init__(
        self,
        is_lost: Callable[[BaseException], bool] = is_connection_error,
        is_broken: Callable[[], bool] = is_group_broken,
    ) -> None:
        self._is_lost = is_lost
        self._is_broken = is_broken
        self.ledger: Ledger | None = None
        self.clock: StreamClock | None = None
        self.forget()

    def forget(self) -> None:
        """Starts over, in another group."""
        self._error: BaseException | None = None
        self._num_made = 0
        if self.clock is not None:
            self.clock.forget()

    def open_call(self) -> None:
        """A call begins whose steps exchange gradients."""
        if self.clock is not None:
            self.clock.begin()

    def track(self, future: Any, is_last: bool) -> Any:
        """Stands for an exchange that was begun; `is_last` says that the gradients of a model are complete with it."""
        self.count(is_last)
        if is_last and self.clock is not None:
            self.clock.end()
        is_awaited = is_last and self.ledger is not None and self.ledger.begin_exchange()  # the pass is over but for it
        received = partial(self._received_last, is_awaited) if is_last else self._received
        return future.then(received)  # not a callback beside it, which the backward pass would not wait for

    def own_s(self) -> float:
        """Seconds of training so far outside of exchanges; 0 where that is not known."""
        if self.clock is not None:
            return self.clock.seconds()
        return 0.0 if self.ledger is None else self.ledger.own_s()

    def timed(self, group: Group) -> AbstractContextManager[None]:
        """Count the time inside as an exchange that the backward pass waits for."""
        return nullcontext() if self.ledger is None else self.ledger.exchanging(group)

    def count(self, is_last: bool) -> None:
        """Counts an exchange; one that raises by itself is not one, and what it raises is to be given to `note`."""
        self._num_made += is_last

    def _received_last(self, is_awaited: bool, future: Any) -> Any:
        received = self._received(future)
        if is_awaited:
            assert self.ledger is not None
            self.ledger.end_exchange()
        if self.clock is not None:
            self.clock.begin()
        return received

    def _received(self, future: Any) -> Any:
        with self.noting():
            return future.value()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what an exchange raises in the block."""
        try:
            yield
        except Exception as error:
            self.note(error)
            raise

    def note(self, error: BaseException) -> None:
        """Keeps the first exception that an exchange raised because the group is broken."""
        if self._error is None and self._is_lost(error):
            self._error = error

    @property
    def has_broken(self) -> bool:
        """True if an exchange of the running step has failed because the group is broken."""
        return self._error is not None

    def check(self) -> None:
        """Ends a step; raises if it cannot count because the group broke in it.

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
    """Lets an optimizer step only where the step counts, in place, so that there is no other way to step it.

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
