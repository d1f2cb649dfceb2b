"""An actor that gives back a reservation if the process that made it dies.

Ray ends the actors of a process together with that process. The placement groups that an actor or a task has created
stay until the whole job ends, though, and would keep the resources of a trainer that was killed.
"""

from __future__ import annotations

import importlib
import threading
import time
from contextlib import suppress
from typing import Any

from raysgd.engine.processes.outliving import NAMESPACE, keeper

_POLL_S = 2.0


def guard(name: str) -> Any:
    """Return an actor that removes the placement group of this name once this process is dead; None if Ray does that.

    Kill the actor when you have removed the group yourself. Make it before the group, so that no moment is unguarded.
    """
    import ray

    context = ray.get_runtime_context()
    maker = (context.get_worker_id(), context.get_node_id()) if keeper() is None else (context.get_actor_id(), None)
    if not _is_alive(*maker):  # a driver, whose groups end with its job, or a Ray that does not tell
        return None
    return (
        ray.remote(ReservationGuard)
        .options(num_cpus=0, lifetime="detached", namespace=NAMESPACE, name=name, max_restarts=-1)
        .remote(name, *maker)
    )


def _is_alive(maker: str, node_id: str | None) -> bool:
    """Return whether a process of a task or an actor lives; without a node, whether an actor does or will again.

    Ray keeps these queries private; without them, none does.
    """
    import ray

    try:
        state = importlib.import_module("ray._private.state")
        if node_id is None:
            return bool(state.actors(maker).get("State", "DEAD") != "DEAD")
        workers = state.workers()
    except (ImportError, AttributeError):
        return False
    return maker in workers and any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


class ReservationGuard:
    """Waits in a thread until a process is dead, removes its placement group, and ends.

    It belongs to no other actor, so it outlives the process, and Ray starts it again elsewhere if its node is lost.
    """

    def __init__(self, name: str, maker: str, node_id: str | None) -> None:
        threading.Thread(target=self._watch, args=(name, maker, node_id), daemon=True).start()

    def _watch(self, name: str, maker: str, node_id: str | None) -> None:
        import ray

        while _is_alive(maker, node_id):
            time.sleep(_POLL_S)
        time.sleep(_POLL_S)  # what the process asked for last may be on its way
        with suppress(ValueError):  # there is no such group
            ray.util.remove_placement_group(ray.util.get_placement_group(name))
        ray.kill(ray.get_runtime_context().current_actor)
