"""Defines `Call`, a function to run on a group's workers, and `CallHandle`, a handle to a call in the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import World

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A function to run on the workers of a group, and how to recover from failures while it runs.

    Attributes:
        function: Runs on the worker as `function(replica, *args)`.
        args_for: Takes the `World` of each rank and returns the arguments of each rank. Called for every attempt,
            because the number of ranks may change.
        changes_state: True if the call changes the replicas' training state. A restart must then restore a snapshot
            taken after the call or repeat the call.
        keeps_alike: True if replicas that were in sync before the call are in sync after it. If such a call fails on
            only some ranks, the replicas may be out of sync.
        captures: True to copy the replicas' state after the call even if no snapshot is due.
        rank: The only rank that runs the call. None for all ranks.
        on_wait: Called about ten times a second while the driver waits for the call. Not called if the driver is the
            only worker.
        resume: Function that resumes the call in a newly formed group, with the same arguments as `function`. None if
            the call can only start over. That is enough for a call that does not change the state.
        leaves_as_new: True if new workers are built with the state that this call produces. A restart then need not
            repeat the call.
        check: Called with the values of all ranks before the call counts as completed. If it raises, the group is
            killed, because its replicas are out of sync.
        divergence: Checks whether ranks ran different steps, so that some would wait for other ranks forever. Returns a
            description of the difference, or "". Takes one object per rank: while the call runs, the rank's heartbeat;
            after the call has failed, the rank's value or failure.
        may_continue: False if survivors of a failure must not continue the call in a new group.
        is_short: True if the call may be so short that the time to send it matters.
        is_repeatable: True if repeating the call later gives the same result. False for a function that reads the
            user's objects, because the user may change them before the call is repeated.
        split: Called if memory ran out, with the number of samples that each worker that reports it can process at
            once. The next attempt's arguments must let all ranks process smaller batches.
        leaves: Called regularly while the call runs. Once it returns True, the call ends early: all ranks stop at an
            upcoming step, and the call ends as `Left`. Only for calls that can be resumed. See ADR 140.
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
    divergence: Callable[[Mapping[int, Any]], str] = lambda told: ""
    may_continue: bool = True
    is_short: bool = False
    is_repeatable: bool = True
    leaves: Callable[[], bool] | None = None
    split: Callable[[Mapping[Any, int]], None] | None = None

    @property
    def can_continue(self) -> bool:
        """True if survivors of a failure can continue the call in a new group."""
        return self.may_continue and (self.resume is not None or not self.changes_state)

    @property
    def is_kept(self) -> bool:
        """True if a restart must not lose the call's effect.

        The restart must then restore a snapshot taken after the call, or repeat the call.
        """
        return self.changes_state and not self.leaves_as_new

    def on_its_ranks(self, args: Sequence[Sequence[Any]]) -> dict[int, Sequence[Any]]:
        """Return the arguments, by rank, of the ranks that run the call.

        Args:
            args: The arguments of every rank of the group, by rank.
        """
        return dict(enumerate(args)) if self.rank is None else {self.rank: args[self.rank]}


@dataclass(frozen=True)
class Completed:
    """How a call ended: every rank completed it.

    Attributes:
        values: The values that the ranks returned, in rank order.
    """

    values: list[Any]


@dataclass(frozen=True)
class Left:
    """How a call ended: early, with all ranks after the same step.

    Attributes:
        parts: Each rank's part of the snapshot after that step, in rank order. The driver has the snapshot.
    """

    parts: list[Capture]


class CallHandle(ABC, Generic[T]):
    """A handle to a trainer's call that runs in the background."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the call has finished, whether with a result or an error."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return its result.

        Args:
            timeout: Seconds to wait. None waits until the call finishes.

        Raises:
            TimeoutError: The call is still running. It is not interrupted.
            Exception: The error that the call raised.
        """
