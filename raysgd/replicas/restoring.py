"""A saved state on its way into all workers: whether it has its parts, and the call that loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.engine.call import Call
from raysgd.engine.controller import ElasticController
from raysgd.engine.snapshots import Snapshot, own_states
from raysgd.engine.transfers import Stored
from raysgd.engine.types import World


def check_parts(state: Mapping[str, Any], counts: Mapping[str, int], *others: str) -> None:
    """Refuses a state that lacks a part. The driver knows no more than how many there are of each.

    Raises:
        KeyError: A part is missing.
        ValueError: Another number of them was saved.
    """
    missing = [key for key in ("epoch", *others, *counts) if key not in state]
    if missing:
        raise KeyError(f"The state has no {', '.join(map(repr, missing))}; it has {sorted(map(str, state))}.")
    for key, count in counts.items():
        if not isinstance(state[key], list | tuple):
            raise ValueError(
                f"The state's {key!r} is a `{type(state[key]).__name__}` instead of a list. Nothing was loaded."
            )
        if len(state[key]) != count:
            raise ValueError(
                f"The state holds {len(state[key])} {key}, but the operator registered {count}. Nothing was loaded; "
                "load it with what saved it."
            )


def load_into_all(
    controller: ElasticController,
    restore: Callable[..., Any],
    state: Any,
    rank_states: tuple[Any, ...],
    is_complete: bool,
) -> None:
    """Loads a state into all workers.

    Args:
        controller: Runs the call.
        restore: The method of a replica that takes it over.
        state: What concerns all ranks; it may lie in the store already.
        rank_states: What each rank had for itself.
        is_complete: Whether that is all there is: then a recovery starts from it, and no snapshot is fetched.
    """

    def arguments(worlds: Sequence[World]) -> list[tuple[Any, Any]]:
        return list(zip(controller.ensure_group().share(state), own_states(rank_states, len(worlds)), strict=True))

    call = Call(restore, arguments, changes_state=not is_complete, keeps_alike=True)
    controller.run(call)
    if is_complete:
        value, reference = (state.value, state.reference) if isinstance(state, Stored) else (state, None)
        controller.snapshots.adopt(Snapshot(value, rank_states, reference=reference))
