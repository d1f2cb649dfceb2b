"""Pure: which ranks of a group share a node, and who talks to whom across nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Nodes:
    """The nodes of the ranks of a group.

    Attributes:
        hosts: The address of each rank's node, by rank; the same on all ranks.
    """

    hosts: tuple[str, ...]

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The ranks of each node, in the order of the first rank of each."""
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            found.setdefault(host, []).append(rank)
        return list(found.values())

    @cached_property
    def are_shared(self) -> bool:
        """True if there are several nodes, and several ranks on one of them."""
        return 1 < len(self.ranks) < len(self.hosts)

    @cached_property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [ranks[0] for ranks in self.ranks]

    @cached_property
    def lanes(self) -> list[list[int]]:
        """Ranks that exchange a part with each other, one of each node; as many lanes as every node has ranks for."""
        return [list(lane) for lane in zip(*self.ranks, strict=False)]

    @cached_property
    def in_order(self) -> list[int]:
        """All ranks, node by node."""
        return [rank for ranks in self.ranks for rank in ranks]

    def beside(self, rank: int) -> list[int]:
        """The ranks on the node of this one, itself included."""
        return next(ranks for ranks in self.ranks if rank in ranks)


def tree(ranks: Sequence[int], rank: int) -> tuple[int | None, list[int]]:
    """From whom a rank hears what the first of `ranks` says, and to whom it passes it on, in this order.

    The number of ranks that know doubles with each message.
    """
    place, above = list(ranks).index(rank), None
    reach = 1
    while reach < len(ranks):
        reach *= 2
    passed_on = []
    step = reach // 2
    while step:
        if place % (2 * step) == 0 and place + step < len(ranks):
            passed_on.append(ranks[place + step])
        elif place % (2 * step) == step:
            above = ranks[place - step]
        step //= 2
    return above, passed_on


@dataclass(frozen=True)
class PowerOfTwoRole:
    """The part of a rank where only a power of two can take part.

    Attributes:
        ranks: Those that are left: the first ones in pairs, of which one gives the other what it has, and the rest.
        place: Of this rank among them; None if it is not.
        giver: Who gives this rank what it has, if anybody does.
        taker: To whom this rank gives what it has, if it does.
    """

    ranks: tuple[int, ...]
    place: int | None
    giver: int | None = None
    taker: int | None = None


@lru_cache(maxsize=64)
def power_of_two_role(ranks: tuple[int, ...], rank: int) -> PowerOfTwoRole:
    """Return what `rank` does when pairs of ranks add up first, so that a power of two of them is left."""
    num_pairs = len(ranks) - (1 << (len(ranks).bit_length() - 1))
    takers, givers = ranks[0 : 2 * num_pairs : 2], ranks[1 : 2 * num_pairs : 2]
    left = (*takers, *ranks[2 * num_pairs :])
    if rank in givers:
        return PowerOfTwoRole(left, None, taker=takers[givers.index(rank)])
    return PowerOfTwoRole(left, left.index(rank), giver=givers[takers.index(rank)] if rank in takers else None)
