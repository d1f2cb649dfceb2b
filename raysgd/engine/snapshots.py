"""The retry point: the state to which a group that lost workers goes back.

The bytes are held by the driver, because a value that an actor returned may exist only on the node that was just lost.
A snapshot is copied once in the worker, at the end of a call, and travels while the group already works on the next
one. Until it has landed, the calls that it covers are remembered, so that they can be run again from the snapshot
before it.

Why snapshots are taken after calls: ADR 4.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from raysgd.engine.replica import Capture

logger = logging.getLogger(__name__)

CallT = TypeVar("CallT")


@dataclass(frozen=True)
class Snapshot:
    """A state that the driver holds.

    Attributes:
        shared_state: What all ranks share.
        rank_states: What each rank had for itself.
        progress: How far each rank was in the call in which it was taken; None when it was taken between calls.
        reference: Ray's reference to the shared state, where it came through the object store.
    """

    shared_state: Any
    rank_states: tuple[Any, ...]
    progress: tuple[Any, ...] | None = None
    reference: Any = None

    def for_ranks(self, num_ranks: int) -> list[tuple[Any, ...]]:
        """What each rank of a new group, of whatever size, takes of it beside the shared state.

        That is its own state, and where there is progress, that of rank 0 and of all whose metrics it counts.
        """
        own, progress = own_states(self.rank_states, num_ranks), self.progress
        if progress is None:
            return [(state,) for state in own]
        return [(state, progress[0], progress[rank::num_ranks]) for rank, state in enumerate(own)]


def own_states(rank_states: Sequence[Any], num_ranks: int) -> list[Any]:
    """The state of each rank; None for ranks that there were not."""
    return [*rank_states[:num_ranks], *[None] * (num_ranks - len(rank_states))]


class Transfer(Protocol):
    """A shared state on its way from a worker to the driver."""

    def result(self, timeout_s: float | None) -> Any:
        """The state; raises `TimeoutError` while it is on its way, anything else when it is lost."""


@dataclass(frozen=True)
class _OnItsWay:
    transfer: Transfer
    token: int | None
    rank_states: tuple[Any, ...]
    progress: tuple[Any, ...] | None
    needs_worker: bool = True


class SnapshotKeeper(Generic[CallT]):
    """Keeps the newest snapshot that has landed, and the calls completed since it was taken."""

    def __init__(self) -> None:
        self.landed: Snapshot | None = None
        self.landed_token: int | None = None
        self.landed_at: float | None = None
        self._coming: _OnItsWay | None = None
        self._num_covered = 0
        self._calls: list[CallT] = []
        self._is_stale = False
        self._is_stale_for_ranks = False

    @property
    def is_inside(self) -> bool:
        """Whether `landed` was taken inside the call that follows those it covers: that one can continue."""
        return self.landed is not None and self.landed.progress is not None

    @property
    def calls_since(self) -> tuple[CallT, ...]:
        """The calls to run again after `landed` was restored, oldest first."""
        return tuple(self._calls)

    @property
    def is_current(self) -> bool:
        """Whether the newest state is covered by a snapshot, landed or coming."""
        return self.shares_current and not self._is_stale_for_ranks

    @property
    def shares_current(self) -> bool:
        """Whether that holds for what all ranks share; of what is a rank's own, newer random numbers may be missing."""
        return self.has_any and not self._is_stale

    @property
    def has_any(self) -> bool:
        """Whether there is a snapshot at all, landed or coming."""
        return self.landed is not None or self._coming is not None

    def completed(self, call: CallT | None) -> None:
        """Notes that a call changed the state; None for one that will never have to be run again."""
        self._is_stale = True
        if call is not None:
            self._calls.append(call)

    def touch(self) -> None:
        """Notes that the state may have changed in a way that no call explains."""
        self._is_stale = True

    def touch_ranks(self) -> None:
        """Notes the same of what each rank has for itself alone."""
        self._is_stale_for_ranks = True

    def leave_call(self) -> None:
        """Notes that the running call was broken off for good: it will not continue from inside."""
        if self._coming is not None and self._coming.progress is not None:
            self._coming = None
        if self.landed is not None and not self._calls:
            self.landed = replace(self.landed, progress=None)

    @property
    def is_coming(self) -> bool:
        """Whether a snapshot is on its way. Another one would overtake it, and under haste none would ever land."""
        return self._coming is not None

    def take(self, captures: Sequence[Capture], fetch: Callable[[int], Transfer], *, is_first: bool = False) -> None:
        """Takes over what the ranks captured after the last completed call; `fetch` starts a transfer from rank 0.

        `is_first` says that the ranks have just been set up: what they captured covers no call at all.
        """
        self.poll()
        num_covered = 0 if is_first else len(self._calls)
        self._is_stale, self._is_stale_for_ranks = len(self._calls) > num_covered, False
        rank_states = tuple(capture.rank_state for capture in captures)
        source = captures[0]
        progress = tuple(capture.progress for capture in captures) if source.progress is not None else None
        if source.token is None:
            self._land(Snapshot(source.shared_state, rank_states, progress), None, num_covered)
        else:
            self._coming = _OnItsWay(fetch(source.token), source.token, rank_states, progress)
            self._num_covered = num_covered

    def poll(self, timeout_s: float | None = 0.0) -> None:
        """Lets a snapshot land that has arrived, waiting for it up to `timeout_s` (None: as long as it takes)."""
        if self._coming is None:
            return
        try:
            state = self._coming.transfer.result(timeout_s)
        except TimeoutError:
            return
        except Exception as error:  # lost with its worker: the one before it, and the calls since, still stand
            logger.warning("a snapshot was lost in transit: %s", error)
            self._coming = None
            self._is_stale = True
            return
        coming = self._coming
        reference = getattr(coming.transfer, "reference", None)
        self._land(Snapshot(state, coming.rank_states, coming.progress, reference), coming.token, self._num_covered)

    def drop_incoming(self) -> None:
        """Notes that the workers are gone: what they were sending will not come, and new ones count tokens from 1."""
        if self._coming is not None and not self._coming.needs_worker:
            self.poll(timeout_s=None)
        if self._coming is not None:
            self._coming, self._is_stale = None, True
        self.landed_token = None

    def adopt(self, snapshot: Snapshot) -> None:
        """Takes over a state that the driver had before the workers did."""
        self._coming, self._is_stale, self._is_stale_for_ranks = None, False, False
        self._land(snapshot, self.landed_token, len(self._calls))

    def expect(self, transfer: Transfer, rank_states: tuple[Any, ...], call: CallT) -> None:
        """Takes over a state that the driver had before the workers did, and that it is still storing.

        Args:
            transfer: Brings it; no worker has to live for that.
            rank_states: What each rank has for itself.
            call: What brought the state to the workers; is run again after a loss if the transfer fails.
        """
        self.completed(call)
        self._coming = _OnItsWay(transfer, self.landed_token, rank_states, None, needs_worker=False)
        self._num_covered, self._is_stale, self._is_stale_for_ranks = len(self._calls), False, False

    def clear(self) -> None:
        """Drops everything, once nothing in the driver works on it any more."""
        if self._coming is not None and not self._coming.needs_worker:
            self.poll(timeout_s=None)
        self.landed, self._coming = None, None
        self._calls.clear()

    def begin_again(self) -> None:
        """Drops everything, for workers that are about to be as new; what they send from now on is counted from 1."""
        self.clear()
        self.landed_token, self._is_stale, self._is_stale_for_ranks = None, False, False

    def _land(self, snapshot: Snapshot, token: int | None, num_covered: int) -> None:
        self.landed, self._coming = snapshot, None
        self.landed_at = time.monotonic()
        self.landed_token = token
        del self._calls[:num_covered]
