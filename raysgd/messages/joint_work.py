"""Pure: the work in a training call that all ranks have to do alike, and how ranks that did not are told apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._text.log_lines import named


@dataclass(frozen=True)
class JointWork:
    """The work of one rank in a call.

    Attributes:
        counts: How often it did what.
        marks: A number before the first thing or after each of the last ones, which follows from all before it.
        is_over: Whether its call has ended.
        number: The number of the call in its group.
    """

    counts: Mapping[str, int]
    marks: tuple[int, ...]
    is_over: bool = True
    number: int = 1

    @property
    def num(self) -> int:
        """The number of things that it did."""
        return sum(self.counts.values())

    def can_become(self, other: JointWork) -> bool:
        """Return whether a rank may come to what another one did, which is as much or more, as far as that is known."""
        num_behind = other.num - self.num
        if self.is_over and num_behind:
            return False
        return num_behind >= len(other.marks) or other.marks[-1 - num_behind] == self.marks[-1]


def difference(told: Mapping[int, Any]) -> str:
    """Return what ranks did that cannot become the same; nothing where it can.

    Args:
        told: Heartbeats, answers and failures, by rank. Those without `joint_work` do not count, and those of a call
            before: that rank has not begun this one.
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
