"""Connects TensorFlow workers over raysgd's own sockets.

In a group of several workers, each worker has the environment variable `TF_CONFIG` in the format that TensorFlow
documents. User code may read its rank from this variable.

ADR 31 explains why TensorFlow's own collectives are not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raysgd.core.connections._origins import with_causes
from raysgd.core.connections.group import EarlyVotes, Group
from raysgd.core.connections.mesh.board import others
from raysgd.core.connections.mesh.meeting import ConnectFailed, ListeningConnection
from raysgd.core.connections.mesh.mesh import Mesh, MeshBroken
from raysgd.core.engine.shared.types import Rendezvous, World

GROWTH = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
"""Environment variable with which TensorFlow takes memory of a GPU as it needs it. By default, it takes all of it."""


@dataclass
class TensorFlowConnection(ListeningConnection):
    """Connects workers that each run TensorFlow independently. Collectives use raysgd's own sockets.

    Attributes:
        variables: Environment variables to set in remote workers before TensorFlow is imported.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    _num_threads: int | None = field(default=None, repr=False, compare=False)

    def limit_threads(self, num_threads: int) -> None:
        super().limit_threads(num_threads)
        self._num_threads = num_threads

    def load(self) -> None:
        """Import TensorFlow. In a worker process, set `variables` before the import, and limit threads after it."""
        if self._num_threads is None:  # the environment and the threads of the driver belong to the user
            import tensorflow  # noqa: F401

            return
        os.environ.update(self.variables)
        import tensorflow as tf

        try:
            tf.config.threading.set_intra_op_parallelism_threads(self._num_threads)
            # One extra thread, because a TensorFlow operation that waits for other ranks occupies a thread.
            tf.config.threading.set_inter_op_parallelism_threads(self._num_threads + 1)
        except RuntimeError:  # the user's `initialization_hook` has already initialized TensorFlow
            return

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Connect this rank to all other ranks. A group of one rank needs no connections.

        Raises:
            RuntimeError: This process is already in another group.
        """
        global _JOINED
        if not world.is_distributed:
            return
        if _JOINED is not None:
            raise RuntimeError(
                "Another trainer with `use_local=True` has its rank 0 in this process, which can hold one only: "
                "shut that trainer down first."
            )
        lanes = self._meet(rendezvous, world, *[others(world.rank, world.size)] * 2)
        gradients, votes = (Mesh(lane, self.timeout_s) for lane in lanes)
        self._parts = [gradients, votes]
        self._check_forming()  # raise if this rank was interrupted before the connections existed
        addresses = [f"{host}:{port}" for host, port in zip(rendezvous.hosts, rendezvous.ports, strict=True)]
        self._set_variables({"TF_CONFIG": cluster_of(addresses, world.rank)})
        _JOINED = Group(world, gradients, rendezvous.hosts), EarlyVotes(world, votes)

    def leave(self) -> None:
        global _JOINED
        if self._parts:
            _JOINED = None
        super().leave()

    def is_connection_error(self, error: BaseException) -> bool:
        return any(isinstance(link, MeshBroken | ConnectFailed) for link in with_causes(error))


_JOINED: tuple[Group, EarlyVotes] | None = None
"""The group that this process has joined: its collectives, and its votes on whether any rank has data left."""


def group_of(world: World) -> Group:
    """Return the collectives of the group that this process joined.

    If the group has only one rank, or this process has not joined a group yet, as in a standby worker, return the
    collectives of a single-rank group.
    """
    return _JOINED[0] if world.is_distributed and _JOINED is not None else Group(World(0, 1))


def votes() -> EarlyVotes:
    """Return the votes with which the ranks of this process's group agree on whether any rank has data left."""
    assert _JOINED is not None, "a rank that is alone has no other rank to ask"
    return _JOINED[1]


def cluster_of(addresses: Sequence[str], rank: int) -> str:
    """Return the value of `TF_CONFIG` for one worker.

    >>> cluster_of(["a:1"], 0)
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    """
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def keras_of_driver() -> dict[str, str]:
    """Return the driver's environment variables that select the Keras version and backend.

    Workers must set them before they import TensorFlow.
    """
    return {name: os.environ[name] for name in ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND") if name in os.environ}
