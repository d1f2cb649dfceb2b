"""Ranks in words: a message about a thousand workers is as short as one about two."""

from __future__ import annotations

from collections.abc import Collection


def listed(ranks: Collection[int]) -> str:
    """Ranks in order, for sentences; four or more in a row as a range."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs)


def named(ranks: Collection[int]) -> str:
    """The same with the word before them.

    >>> named([2]), named(range(4)), named([0, 2])
    ('rank 2', 'ranks 0-3', 'ranks 0, 2')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"
