"""One piece of work for the group, and the handle of one that runs while the program goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raysgd.engine.shared.types import World

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One piece of work for the group.

    Attributes:
        function: Runs on the worker as `function(replica, *args)`.
        args_for: The arguments of each rank, made again for every attempt because the world may have changed.
        changes_state: Whether replicas are different afterwards, so that a snapshot is due.
        keeps_alike: Whether it brings all replicas from one state to another, so that one on which it failed by itself
            is another one than the others.
        captures: Whether to copy the state afterwards in any case.
        rank: The only rank to run on; None for all.
        on_wait: Called in the driver some ten times a second while it waits.
        resume: Continues the call in a newly formed group, with the arguments of `function`. None for a
            call that can only be begun again; where replicas are not changed by it, that is as good.
        leaves_as_new: Whether workers that start later are made as it leaves these, so that there is nothing to keep.
        check: Called with the values of all ranks before they count; what it raises ends the group, because its ranks
            are not in one state.
        parted: Called with what ranks say, by rank: heartbeats while they are in the call, values and failures once it
            has failed. Returns how they did different things, so that some would wait for others for ever.
        may_continue: Whether survivors of a failure may continue it at all.
        is_short: Whether it may end so soon that the way to the workers counts.
        is_repeatable: Whether running it again, later, does the same: not if it runs what users may change meanwhile.
        leaves: Asked now and then while it runs: whether all ranks are to stop at the next step and the call is to be
            left there. Its values are then what ranks captured there. Only for a call that can be resumed. ADR 140.
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
        """True if a copy of the state is due after it, or the call itself to be repeated."""
        return self.changes_state and not self.leaves_as_new

    def on_its_ranks(self, args: Sequence[Sequence[Any]]) -> dict[int, Sequence[Any]]:
        """Of the arguments of all ranks those of the ranks that it runs on."""
        return dict(enumerate(args)) if self.rank is None else {self.rank: args[self.rank]}


class CallHandle(ABC, Generic[T]):
    """A call of a trainer that is running, or has ended."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the call has ended, with a result or an error."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return what it came to.

        Args:
            timeout: How many seconds to wait. None waits until the call has ended.

        Raises:
            TimeoutError: The call is still running. It goes on.
            Exception: What the call itself has raised.
        """


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    """Run something in a thread that has no caller: the future raises what it raises."""
    try:
        result = work()
    except BaseException as error:  # whatever it comes to, Ctrl-C and the end of the trainer included
        future.set_exception(error)
    else:
        future.set_result(result)
