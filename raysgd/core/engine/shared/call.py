"""Calls: a piece of work for the group, and the handle of a call that runs in the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raysgd.core.engine.shared.types import World

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One piece of work for the group.

    Attributes:
        function: Runs on the worker as `function(replica, *args)`.
        args_for: Makes the arguments of each rank. Called for every attempt, because the number of ranks may change.
        changes_state: True if the call changes the replicas, so that a snapshot is due after it.
        keeps_alike: True if the call takes all replicas from one common state to another. If it fails on one rank only,
            the state of that rank then differs from the others'.
        captures: True to copy the state after the call in any case.
        rank: The only rank to run on; None for all.
        on_wait: Called in the driver some ten times a second while it waits.
        resume: Continues the call in a newly formed group, with the arguments of `function`. None if the call can only
            start over. That is enough for a call that does not change the replicas.
        leaves_as_new: True if workers that start later already have the state after this call, so it need not be kept.
        check: Called with the values of all ranks before they count. If it raises, the group ends, because the states
            of its ranks differ.
            parted: Returns in words how ranks did different things, so that some would wait for the others forever; ""
                if they did not. Gets one object per rank: heartbeats during the call, values and failures after it
                failed.
        may_continue: False if the call must never continue in place.
        is_short: True if the call may be so short that sending it matters.
        is_repeatable: True if running it again later gives the same result. False for a function that reads what the
            user may change in the meantime.
        leaves: Asked regularly while the call runs. If it returns True, all ranks stop at the next step, and the values
            of the call are what the ranks captured there. Only for a call that can be resumed. ADR 140.
    """

    function: Callable[..., Any]
    args_for: Callable[[Sequence[World]], Sequence[Sequence[Any]]] = lambda worlds: [()] * len(worlds)
    changes_state: bool = False
    keeps_alike: bool = False
    captures: bool = False
    rank: int | None = None
    on_wait: Callable[[], None] | None = None
    resume: Callable[..., Any] | None = None
    leaves_as_new: bool = False
    check: Callable[[Sequence[Any]], None] = lambda values: None
    parted: Callable[[Mapping[int, Any]], str] = lambda told: ""
    may_continue: bool = True
    is_short: bool = False
    is_repeatable: bool = True
    leaves: Callable[[], bool] | None = None

    @property
    def can_continue(self) -> bool:
        """True if survivors of a failure can continue it."""
        return self.may_continue and (self.resume is not None or not self.changes_state)

    @property
    def is_kept(self) -> bool:
        """True if a copy of the state is due after the call, or the call itself has to be repeated."""
        return self.changes_state and not self.leaves_as_new

    def on_its_ranks(self, args: Sequence[Sequence[Any]]) -> dict[int, Sequence[Any]]:
        """Return the arguments of the ranks that it runs on, out of those of all ranks."""
        return dict(enumerate(args)) if self.rank is None else {self.rank: args[self.rank]}


class CallHandle(ABC, Generic[T]):
    """A call of a trainer that is running or has ended."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the call has ended, with a result or an error."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return its result.

        Args:
            timeout: Seconds to wait. None waits until the call has ended.

        Raises:
            TimeoutError: The call is still running. It continues.
            Exception: The error of the call.
        """


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work` in a thread that has no caller. The future gets its result or its exception."""
    try:
        result = work()
    except BaseException as error:  # also Ctrl-C and the end of the trainer
        future.set_exception(error)
    else:
        future.set_result(result)
