"""Records of how each rank spent its time: seconds by category, such as steps, waiting for data or recovery.

The categories are called bins, and the seconds of all bins add up to the elapsed time. Workers measure the times
(`raysgd/trainer/worker/ledger.py`), and the driver sums them (`raysgd/core/history/accounts.py`). ADR 97 explains the
bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

USEFUL, AGAIN, DATA, EXCHANGE, SLOWER_RANK = "useful", "again", "data", "exchange", "slower_rank"
SNAPSHOT, UNDO = "snapshot", "undo"
START_UP, EVALUATION, DRIVER, OTHER = "start_up", "evaluation", "driver", "other"
VALIDATION_WAIT = "validation_wait"
DETECT, FORM, HAND_OVER = "recovery_detect", "recovery_form", "recovery_hand_over"
RESUME, REPLACE = "recovery_resume", "recovery_replace"
RECOVERY = (DETECT, FORM, HAND_OVER, RESUME, REPLACE)

BINS: Mapping[str, str] = {
    USEFUL: "useful steps",
    AGAIN: "steps done again",
    DATA: "waiting for data",
    EXCHANGE: "exchanging",
    SLOWER_RANK: "waiting for a slower rank",
    SNAPSHOT: "snapshot",
    UNDO: "copies to undo a batch",
    DETECT: "recovery: leaving the old group",
    FORM: "recovery: forming a new group",
    HAND_OVER: "recovery: handing over the state",
    RESUME: "recovery: resuming the call",
    REPLACE: "recovery: a worker was missing",
    START_UP: "start-up",
    EVALUATION: "evaluation",
    VALIDATION_WAIT: "waiting for a validation that runs elsewhere",
    DRIVER: "driver (between calls)",
    OTHER: "other",
}
"""For each bin (category of time), the name that users see."""

SHOWN_FROM = 0.005
OUTSIDE = (START_UP, EVALUATION, VALIDATION_WAIT, DRIVER)
_LOST = (AGAIN, SNAPSHOT, UNDO, *RECOVERY)
_AVOIDABLE = {
    "waiting for data": (DATA,),
    "exchanging gradients": (EXCHANGE,),
    "waiting for a slower rank": (SLOWER_RANK,),
    "copying snapshots": (SNAPSHOT,),
    "copying to undo a batch": (UNDO,),
    "recovering from failures": (AGAIN, *RECOVERY),
}


@dataclass(frozen=True)
class TimeSpent:
    """The time that one replica spent on each kind of work, as measured in its worker.

    Attributes:
        of: Identifies the replica. If a replica is replaced, its successor with the same rank has a different value.
        seconds: Seconds by bin (category of time) since the replica was created. For a standby worker, since it joined
            a group.
        unsaved_s: Seconds of training steps since the replica's state was last copied. A restart would have to repeat
            these steps.
        is_successor: True if the replica belongs to a standby worker that joined a running group. It then continues
            from the state of that group rather than from a snapshot.
    """

    of: str
    seconds: Mapping[str, float]
    unsaved_s: float = 0.0
    is_successor: bool = False

    @cached_property
    def total_s(self) -> float:
        """Total seconds, summed over all bins (categories of time)."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class TimeLedger:
    """The time that a trainer's ranks spent on each kind of work: steps, waiting for data, recovery and so on.

    Attributes:
        ranks: For each rank that has reported, its seconds by bin (category of time). A rank's seconds add up to the
            time from the rank's start to its last report.
        notes: Sentences that say what the ledger does not include.
    """

    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def of(self, rank: int) -> Mapping[str, float]:
        """Return a rank's seconds by bin (category of time).

        Raises:
            ValueError: The rank has not reported yet.
        """
        if rank in self.ranks:
            return self.ranks[rank]
        known = f"available ranks are {sorted(self.ranks)}" if self.ranks else "no rank has reported yet"
        raise ValueError(f"`rank={rank!r}` has no ledger: {'; '.join([known, *self.notes])}.")

    def total(self) -> dict[str, float]:
        """Return the seconds by bin (category of time), summed over all ranks. Empty bins are omitted."""
        return dict(self._total)

    @cached_property
    def _total(self) -> dict[str, float]:
        sums = dict.fromkeys(BINS, 0.0)
        for seconds in self.ranks.values():
            for name in seconds.keys() & sums.keys():
                sums[name] += seconds[name]
        return {name: seconds for name, seconds in sums.items() if seconds > 0}

    @property
    def training_s(self) -> float:
        """Seconds in training calls, including recoveries, summed over all ranks."""
        return seconds_in_calls(self.total())

    @property
    def goodput(self) -> float | None:
        """Fraction of the time in training calls that was neither lost to failures nor spent on preparing for failures.

        The value is None before the first training call.
        """
        return goodput_of(self.total())

    def largest_avoidable(self) -> tuple[str, float] | None:
        """Return the avoidable activity, such as waiting for data, that took the most time in training calls.

        Returns:
            The name of the activity and the fraction of the time in training calls that it took. None before the first
            training call.
        """
        total = self.total()
        inside = seconds_in_calls(total)
        if not inside:
            return None
        shares = {words: sum(total.get(name, 0.0) for name in names) / inside for words, names in _AVOIDABLE.items()}
        words = max(shares, key=shares.__getitem__)
        return words, shares[words]

    def __str__(self) -> str:
        total = self.total()
        everything = sum(total.values())
        shares = {name: spent / everything for name, spent in total.items()}
        parts = [f"{words} {shares[name]:.1%}" for name, words in BINS.items() if shares.get(name, 0.0) >= SHOWN_FROM]
        goodput = self.goodput
        head = [] if goodput is None else [f"goodput {goodput:.1%}"]
        return "; ".join([*head, *([", ".join(parts)] if parts else []), *self.notes])


def goodput_of(seconds: Mapping[str, float]) -> float | None:
    """Return the fraction of the time in training calls that was not lost to failures or spent on preparing for them.

    Return None if there was no training call.

    Args:
        seconds: Seconds by bin (category of time).

    Examples:
        >>> goodput_of({"useful": 8.0, "data": 1.0, "recovery_form": 1.0, "driver": 100.0})
        0.9
    """
    inside = seconds_in_calls(seconds)
    return 1.0 - sum(seconds.get(name, 0.0) for name in _LOST) / inside if inside else None


def seconds_in_calls(seconds: Mapping[str, float]) -> float:
    """Return the seconds that were spent in training calls, including recoveries.

    Args:
        seconds: Seconds by bin (category of time).
    """
    return sum(spent for name, spent in seconds.items() if name not in OUTSIDE)
