"""Compares the actions, such as all-reduces, that the ranks have taken in a training call.

All ranks must take the same actions in the same order. Otherwise, they wait for each other forever, or their models
become different. This module does no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.core.text.log_lines import named


@dataclass(frozen=True)
class JointWork:
    """Record of the all-reduces and similar actions of one rank in a training call.

    All ranks must take the same actions in the same order.

    Attributes:
        counts: How many times the rank has taken each kind of action, by the action's name.
        marks: Hashes of the sequence of actions. The last hash covers all actions so far. Each earlier hash covers one
            action less than the hash after it.
        is_over: True if the training call has ended on this rank.
        number: Number of the training call, counted from when the group of workers formed.
    """

    counts: Mapping[str, int]
    marks: tuple[int, ...]
    is_over: bool = True
    number: int = 1

    @property
    def num(self) -> int:
        """Total number of actions that the rank has taken."""
        return sum(self.counts.values())

    def can_become(self, other: JointWork) -> bool:
        """Return True if this rank can catch up, because the other rank's actions begin with this rank's actions.

        Also return True if this rank is so far behind that `other` has no hash to compare with. Return False if the
        other rank has taken more actions, but the training call has already ended on this rank.

        Args:
            other: Record of a rank that has taken at least as many actions.
        """
        num_behind = other.num - self.num
        if self.is_over and num_behind:
            return False
        return num_behind >= len(other.marks) or other.marks[-1 - num_behind] == self.marks[-1]


def difference(by_rank: Mapping[int, Any]) -> str:
    """Describe how the actions of ranks in a training call differ.

    Return an empty string if all ranks have taken the same actions, or if the ranks that are behind can still catch up.

    Args:
        by_rank: The latest progress report, answer or failure of each rank, by rank. Ranks without a `joint_work` are
            ignored, and so are ranks whose report is from an earlier call.
    """
    known = {rank: work for rank, each in by_rank.items() if (work := getattr(each, "joint_work", None)) is not None}
    newest = max((work.number for work in known.values()), default=0)
    works: dict[int, JointWork] = {rank: work for rank, work in known.items() if work.number == newest}
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
