"""A saved state on its way into all workers: the call that loads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import World
from raysgd.engine.snapshots import Snapshot, own_states
from raysgd.engine.transfers import SharedValue


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

    is_repeatable = isinstance(state, SharedValue)
    call = Call(restore, arguments, changes_state=not is_complete, keeps_alike=True, is_repeatable=is_repeatable)
    with controller.turn():  # a call of another thread in between would count as covered
        controller.run(call)
        if is_complete:
            value, reference = (state.value, state.reference) if isinstance(state, SharedValue) else (state, None)
            controller.snapshots.adopt(Snapshot(value, rank_states, reference=reference))


def load_snapshot_into_all(controller: ElasticController, restore: Callable[..., Any], snapshot: Snapshot) -> None:
    """Loads what the workers of this or another trainer had. It may be shared: nothing of it is changed.

    Args:
        controller: Runs the call.
        restore: The method of a replica that takes it over.
        snapshot: The state. What lies in the store of a single node already is not stored again.
    """
    group = controller.ensure_group()
    is_stored = snapshot.reference is not None and group.is_on_one_node
    shared = snapshot.shared_state
    stored = SharedValue(shared, snapshot.reference) if is_stored else group.store(shared)
    is_complete = len(snapshot.rank_states) == controller.num_workers
    load_into_all(controller, restore, stored, snapshot.rank_states, is_complete)
