"""Records operations that all ranks must take in the same order, and finds ranks that deviate. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.core.text.log_lines import named


@dataclass(frozen=True)
class JointWork:
    """Actions of one rank in a training call, such as all-reduces, that all ranks must take in the same order.

    Attributes:
        counts: Number of times that each action was taken.
        marks: Running hashes of the sequence of actions. The last hash covers all actions so far, and each earlier
            hash covers one action less.
        is_over: True if the call has ended.
        number: Number of the training call, counted from when its worker group formed.
    """

    counts: Mapping[str, int]
    marks: tuple[int, ...]
    is_over: bool = True
    number: int = 1

    @property
    def num(self) -> int:
        """Total number of actions."""
        return sum(self.counts.values())

    def can_become(self, other: JointWork) -> bool:
        """Return True if this rank can still take the same actions as `other`, which has taken at least as many."""
        num_behind = other.num - self.num
        if self.is_over and num_behind:
            return False
        return num_behind >= len(other.marks) or other.marks[-1 - num_behind] == self.marks[-1]


def difference(told: Mapping[int, Any]) -> str:
    """Describe how the actions of ranks differ. Return an empty string if all ranks can still take the same actions.

    Args:
        told: The latest heartbeat, answer or failure of each rank, by rank. Entries without `joint_work` are ignored.
            Entries from an earlier call are ignored too, because their ranks have not started this call yet.
    """
    found = {rank: work for rank, each in told.items() if (work := getattr(each, "joint_work", None)) is not None}
    newest = max((work.number for work in found.values()), default=0)
    works: dict[int, JointWork] = {rank: work for rank, work in found.items() if work.number == newest}
    most = max(works.values(), key=lambda work: work.num, default=None)
    if most is None or all(work.can_become(most) for work in works.values()):
        return ""
    return (
        f"The workers did not do the same in a call: {_told(works)}. Replicas that exchange gradients have to compute "
        "and apply the same ones in the same order. Let the branches of your code follow from what is equal on all "
        'workers, such as a mean over them, and not from a batch or a rank. Or pass `strategy="none"` and keep the '
        "replicas equal yourself."
    )


def _told(works: Mapping[int, JointWork]) -> str:
    names = sorted({name for work in works.values() for name in work.counts})
    uneven = [name for name in names if len({work.counts.get(name, 0) for work in works.values()}) > 1]
    if not uneven:
        return f"{', '.join(names)} as often on all of them, but in another order"
    ranks = defaultdict(list)
    for rank, work in sorted(works.items()):
        ranks[", ".join(f"{name} {_times(work.counts.get(name, 0))}" for name in uneven)].append(rank)
    return "; ".join(f"on {named(those)} {did}" for did, those in ranks.items())


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
