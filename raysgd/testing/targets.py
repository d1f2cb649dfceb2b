"""Finds the workers in which to arm a fault, and checks that this is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.core.engine.group import WorkerGroup


def check_ranks(trainer: Any, rank: int | Sequence[int], may_be_driver: bool) -> list[int]:
    """Check that faults can be armed in the workers with these ranks, and return the ranks in ascending order.

    Args:
        trainer: A running trainer.
        rank: The rank, or several ranks.
        may_be_driver: True if the fault may be armed in the driver's own process.

    Raises:
        ValueError: The trainer has no such rank, or the rank is the driver and `may_be_driver` is False.
        RuntimeError: The trainer was shut down, or its workers are being replaced.
    """
    group = group_of(trainer)
    ranks: list[Any] = list(rank) if isinstance(rank, list | tuple | range | set | frozenset) else [rank]
    if not ranks:
        raise ValueError(f"`rank={rank!r}`: name at least one rank.")
    for each in ranks:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < len(group):
            raise ValueError(f"`rank={rank!r}`: the trainer has the ranks 0 to {len(group) - 1} at this moment.")
        if not may_be_driver and each not in group.remote_ranks:
            raise ValueError(
                f"`rank={rank!r}`: rank {each} is this process (`use_local=True`), so killing it would end your test. "
                f"Use one of {group.remote_ranks or 'the ranks of a trainer with remote workers'}."
            )
    return sorted(set(ranks))


def controller_of(trainer: Any) -> Any:
    """Return the trainer's controller, the object in the driver that runs calls on the workers and retries them.

    Raises:
        TypeError: `trainer` is not a trainer.
    """
    if not hasattr(trainer, "_life"):
        raise TypeError(f"`trainer={trainer!r}`: need a `TorchTrainer` or a `TFTrainer` that is running.")
    return trainer._life.controller


def group_of(trainer: Any) -> WorkerGroup:
    """Return the trainer's current worker group, the object that holds its workers by rank.

    Raises:
        RuntimeError: The trainer was shut down, or its workers are being replaced.
    """
    controller = controller_of(trainer)
    controller.check_active()
    group: WorkerGroup | None = controller.group
    if group is None:
        raise RuntimeError("The trainer has no workers now, because they are being replaced: try again later.")
    return group
