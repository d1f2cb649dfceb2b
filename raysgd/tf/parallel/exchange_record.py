"""The exchanges of a replica with the other ranks: how many, how long the time between them was, what they raised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from raysgd.connections.group import Group
from raysgd.worker.ledger import Ledger


class ExchangeRecord:
    """Counts and times the exchanges of gradients, and holds the group that they go through.

    Attributes:
        group: The ranks; another object once the replica has joined another group.
        before_exchange: Called ahead of each exchange for a step of an optimizer, in one of TensorFlow's threads, if it
            is set. What it raises ends the step before it has changed a weight.
        num_completed: Exchanges of gradients for a step of an optimizer that were completed.
        num_per_step: How many a step of a model that is watched has.
        own_s: Seconds of the training call that were not spent in exchanges, up to the last one.
        ledger: Is told when exchanges begin and end.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.before_exchange: Callable[[], None] | None = None
        self.num_completed = 0
        self.num_per_step = 1
        self.own_s = 0.0
        self.ledger: Ledger | None = None
        self._left_at: float | None = None  # when the last exchange of the call was over
        self._num_samples = 0.0  # of this rank, in all exchanges
        self._error: BaseException | None = None

    def forget_call(self) -> None:
        """Forgets what was measured."""
        self.own_s, self._num_samples = 0.0, 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside is a training call, or a part of one."""
        self._left_at = time.perf_counter()
        try:
            yield
        finally:
            self._left_at = None

    @property
    def num_samples(self) -> int:
        """Samples of this rank in the steps of the training call."""
        return int(self._num_samples / self.num_per_step)

    @contextmanager
    def exchanging(self, num_samples: float, is_step: bool = True) -> Iterator[None]:
        """Inside is an exchange, to which this rank comes with so many samples; whether an optimizer steps after it."""
        is_measured = self._left_at is not None
        if self._left_at is not None:
            self.own_s += time.perf_counter() - self._left_at
        with nullcontext() if self.ledger is None else self.ledger.exchanging(self.group):
            yield
        self.num_completed += is_step
        if is_measured:
            self._num_samples += num_samples * is_step
            self._left_at = time.perf_counter()

    @contextmanager
    def surfacing_errors(self) -> Iterator[None]:
        """Raises what an exchange raised, instead of the words that TensorFlow makes of it."""
        self._error = None
        try:
            yield
        except Exception as error:
            cause, self._error = self._error, None
            if cause is None:
                raise
            raise cause from error

    def note(self, error: BaseException) -> None:
        """Remembers what an exchange raised on its way through TensorFlow."""
        self._error = self._error or error
