"""Routes of messages between ranks that do not all have connections to each other.

Two ranks are neighbors where the way round from one to the other is a power of two. So of N ranks each has about
2 log2 N neighbors, and no message is passed on more than log2 N times.
"""

from __future__ import annotations


def others(rank: int, size: int) -> set[int]:
    """All ranks but this one."""
    return set(range(size)) - {rank}


def neighbors(rank: int, size: int) -> set[int]:
    """The ranks that this one has a connection to."""
    steps = [1 << power for power in range((size - 1).bit_length())]
    return {(rank + step) % size for step in steps} | {(rank - step) % size for step in steps}


def next_of_all(rank: int, source: int, size: int) -> list[int]:
    """Return where a rank sends what `source` says to all: the neighbors that have it from no other rank."""
    distance = (rank - source) % size
    powers = range(distance.bit_length(), (size - 1).bit_length())
    return [(rank + (1 << power)) % size for power in powers if distance + (1 << power) < size]


def next_of_one(rank: int, destination: int, size: int) -> int:
    """Return where a rank sends what is for `destination`: as the same source's messages to all go there.

    So messages of one rank reach another one in the order in which they were sent, those to all and those to one.

    Raises:
        ValueError: It is there already.
    """
    distance = (destination - rank) % size
    if not distance:
        raise ValueError(f"a message for rank {destination} of {size} came back to rank {rank}")
    return (rank + (distance & -distance)) % size
