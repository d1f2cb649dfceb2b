"""Connections of TensorFlow replicas: by sockets of raysgd's own, or by TensorFlow's own strategy.

Both set `TF_CONFIG` in each worker of a group of several, as TensorFlow documents it, so that code which reads its rank
from there finds it.

Why there is a group beside TensorFlow: ADR 31.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.connections._origins import is_of, with_causes
from raysgd.connections.group import EarlyVotes, Group
from raysgd.connections.mesh.board import others
from raysgd.connections.mesh.meeting import ConnectFailed, Deadline, Endpoint, listen_at
from raysgd.connections.mesh.mesh import Mesh, MeshBroken
from raysgd.engine.shared.connection import FORM_TIMEOUT_S, Connection
from raysgd.engine.shared.types import Rendezvous, World

_TF_CONFIG = "TF_CONFIG"

# What TensorFlow says when a peer is gone, or when another program has taken the port that was free. Matched in lower
# case, in the text of its errors.
_BROKEN = (
    "could not start grpc server",
    "collective ops is aborted",
    "connection reset",
    "connection refused",
    "failed to connect to all addresses",
    "socket closed",
    "peer is down",
    "peer has restarted",
    "heartbeat",
    "coordination service",
    "rpc timeout",
    "deadline exceeded",
)
_FROM_PYTHON = "traceback (most recent call last)"  # such an error is what TensorFlow made of one of the user's


@dataclass
class _LoadingConnection(Connection):
    """Ranks that load TensorFlow, and are told one another's addresses.

    Attributes:
        variables: Environment variables to set in remote workers before TensorFlow is imported.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    _num_threads: int | None = field(default=None, repr=False, compare=False)
    _own_variables: list[str] = field(default_factory=list, repr=False, compare=False)

    def limit_threads(self, num_threads: int) -> None:
        super().limit_threads(num_threads)
        self._num_threads = num_threads

    def load(self) -> None:
        load_tensorflow(self.variables, self._num_threads)

    def leave(self) -> None:
        while self._own_variables:
            os.environ.pop(self._own_variables.pop(), None)

    def _announce(self, rendezvous: Rendezvous, world: World) -> None:
        """Sets `TF_CONFIG`."""
        addresses = [f"{host}:{port}" for host, port in rendezvous.addresses]
        os.environ[_TF_CONFIG] = cluster_of(addresses, world.rank)
        self._own_variables.append(_TF_CONFIG)


@dataclass
class TensorFlowConnection(_LoadingConnection):
    """Replicas that each have a TensorFlow of their own, and exchange numbers over connections of raysgd's own.

    Attributes:
        timeout_s: How long to wait for the other ranks.
        form_timeout_s: How long ranks may take to form a group; never longer than `timeout_s`.
    """

    timeout_s: float = 1800.0
    form_timeout_s: float = FORM_TIMEOUT_S
    _endpoint: Endpoint | None = field(default=None, repr=False, compare=False)
    _is_interrupted: bool = field(default=False, repr=False, compare=False)
    _lanes: list[Mesh] = field(default_factory=list, repr=False, compare=False)

    @property
    def opens_for_any_rank(self) -> bool:
        return True

    def open_endpoint(self, host: str, rank: int) -> int:
        self._endpoint = Endpoint(host)
        return self._endpoint.port

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Connects to all other ranks. A group of one rank needs no connections.

        Raises:
            RuntimeError: This process is in another group.
        """
        global _JOINED
        if not world.is_distributed:
            return
        if _JOINED is not None:
            raise RuntimeError(
                "Another trainer with `use_local=True` has its rank 0 in this process, which can hold one only: "
                "shut that trainer down first."
            )
        assert self._endpoint is not None, "a rank of several listens before it joins the others"
        deadline = Deadline(min(self.form_timeout_s, self.timeout_s), lambda: self._is_interrupted)
        lanes = self._endpoint.connect(rendezvous, world.rank, [others(world.rank, world.size)] * 2, deadline)
        self._lanes = [Mesh(lane, self.timeout_s) for lane in lanes]
        deadline.check()  # an interrupt that came before there was anything to cut
        self._announce(rendezvous, world)
        gradients, votes = self._lanes
        _JOINED = Group(world, gradients, rendezvous.hosts), EarlyVotes(world, votes)

    def interrupt(self) -> None:
        self._is_interrupted = True
        for lane in self._lanes:
            lane.interrupt()

    def leave(self) -> None:
        global _JOINED
        for lane in self._lanes:
            lane.close_sockets()
        if self._lanes:
            _JOINED = None
        if self._endpoint is not None:
            self._endpoint.close_sockets()
        self._lanes, self._endpoint, self._is_interrupted = [], None, False
        super().leave()

    def is_connection_error(self, error: BaseException) -> bool:
        return any(isinstance(link, MeshBroken | ConnectFailed) for link in with_causes(error))


@dataclass
class MultiWorkerConnection(_LoadingConnection):
    """One `MultiWorkerMirroredStrategy` over all workers. A process can join one group in its life."""

    def open_endpoint(self, host: str, rank: int) -> int:
        """Finds a port at which TensorFlow can listen, which does so by itself."""
        with listen_at(host) as probe:
            return int(probe.getsockname()[1])

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Makes the strategy; returns when all ranks did."""
        global _STRATEGY
        if not world.is_distributed:
            return
        self._announce(rendezvous, world)
        import tensorflow as tf

        _STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()

    def leave(self) -> None:
        """Takes the variables back. TensorFlow keeps its servers until the process ends."""
        global _STRATEGY
        _STRATEGY = None
        super().leave()

    def is_connection_error(self, error: BaseException) -> bool:
        import tensorflow as tf

        text = str(error).lower()
        return (
            isinstance(error, tf.errors.OpError)
            and any(phrase in text for phrase in _BROKEN)
            and _FROM_PYTHON not in text
            and is_of(error, ["tensorflow", "keras", "tf_keras"])
        )


_JOINED: tuple[Group, EarlyVotes] | None = None
"""What exchanges gradients, metrics and states; and the votes on which ranks have data left, asked meanwhile."""

_STRATEGY: Any = None


def group_of(world: World) -> Group:
    """Return what a rank at this place exchanges gradients through, in the group that this process joined.

    Before it has joined one, as a worker that is made ready to step in, it is alone wherever its place will be.
    """
    return _JOINED[0] if world.is_distributed and _JOINED is not None else Group(World(0, 1))


def votes() -> EarlyVotes:
    """The votes of the group that this process joined as one of several ranks."""
    assert _JOINED is not None, "a rank that is alone has no other rank to ask"
    return _JOINED[1]


def strategy() -> Any:
    """The strategy that this process joined; None without one."""
    return _STRATEGY


def load_tensorflow(variables: Mapping[str, str], num_threads: int | None) -> None:
    """Imports TensorFlow, in a process of our own with these variables set and its threads limited.

    `num_threads` is None in the driver, whose environment and threads are the user's business.
    """
    if num_threads is None:
        import tensorflow  # noqa: F401

        return
    os.environ.update(variables)
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)
        # One more, because an operation that waits for the other ranks holds a thread.
        tf.config.threading.set_inter_op_parallelism_threads(num_threads + 1)
    except RuntimeError:  # the user's hook has used TensorFlow already
        return


def cluster_of(addresses: Sequence[str], rank: int) -> str:
    """The value of `TF_CONFIG` for one worker.

    >>> cluster_of(["a:1"], 0)
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    """
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def keras_of_driver() -> dict[str, str]:
    """The driver's choice of Keras, which workers have to know before they import TensorFlow."""
    return {name: os.environ[name] for name in ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND") if name in os.environ}
