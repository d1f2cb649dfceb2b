"""How TensorFlow replicas are connected: by a gloo group beside them, or by TensorFlow's own strategy.

Both set `TF_CONFIG` in each worker of a group of several, as TensorFlow documents it, so that code which reads its rank
from there finds it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.backends._meeting import Meeting, MeetingFailed
from raysgd.backends._origins import is_of
from raysgd.backends.base import Backend
from raysgd.backends.torch import TorchBackend
from raysgd.engine.types import Rendezvous, World

_TF_CONFIG = "TF_CONFIG"

# What TensorFlow's collectives say when a peer is gone. Matched in lower case, in the text of one of its own errors.
_BROKEN = (
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
class TensorFlowBackend(TorchBackend):
    """Replicas that each have a TensorFlow of their own, and exchange numbers through one gloo group.

    The group is PyTorch's. A trainer that never has more than one worker needs none, and loads no PyTorch.

    Attributes:
        connects: Whether there may ever be several workers.
        variables: Environment variables to set in remote workers before TensorFlow is imported.
    """

    connects: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    _num_threads: int | None = field(default=None, repr=False, compare=False)

    def limit_threads(self, num_threads: int) -> None:
        super().limit_threads(num_threads)
        self._num_threads = num_threads

    def load(self) -> None:
        load_tensorflow(self.variables, self._num_threads)
        if self.connects:
            super().load()

    def open_rendezvous(self) -> int:
        return super().open_rendezvous() if self.connects else 0

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        super().join(rendezvous, world, even_alone=even_alone)
        if world.is_distributed:
            self._store.set(f"raysgd/address/{world.rank}", free_address(rendezvous))
            addresses = [self._store.get(f"raysgd/address/{rank}").decode() for rank in range(world.size)]
            self._own_variables += announce(addresses, world)

    def is_connection_error(self, error: BaseException) -> bool:
        return self.connects and super().is_connection_error(error)


@dataclass
class MultiWorkerBackend(Backend):
    """One `MultiWorkerMirroredStrategy` over all workers. A process can join one group in its life.

    Attributes:
        timeout_s: How long to wait for the other ranks to come.
        variables: Environment variables to set in remote workers before TensorFlow is imported.
    """

    timeout_s: float = 1800.0
    variables: Mapping[str, str] = field(default_factory=dict)
    _num_threads: int | None = field(default=None, repr=False, compare=False)
    _meeting: Meeting | None = field(default=None, repr=False, compare=False)
    _own_variables: list[str] = field(default_factory=list, repr=False, compare=False)

    def limit_threads(self, num_threads: int) -> None:
        super().limit_threads(num_threads)
        self._num_threads = num_threads

    def load(self) -> None:
        load_tensorflow(self.variables, self._num_threads)

    def open_rendezvous(self) -> int:
        self._meeting = Meeting(self.timeout_s)
        return self._meeting.open()

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Meets the others to learn their addresses, and makes the strategy; returns when all ranks did."""
        global _STRATEGY
        if not world.is_distributed:
            return
        meeting = self._meeting = self._meeting or Meeting(self.timeout_s)
        own = free_address(rendezvous)
        addresses = meeting.exchange(rendezvous.address, rendezvous.port, world.rank, world.size, own)
        self._own_variables += announce(addresses, world)
        import tensorflow as tf

        _STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()

    def interrupt(self) -> None:
        if self._meeting is not None:
            self._meeting.interrupt()

    def leave(self) -> None:
        """Takes the variables back. TensorFlow keeps its servers until the process ends."""
        global _STRATEGY
        if self._meeting is not None:
            self._meeting.close()
        _STRATEGY, self._meeting = None, None
        while self._own_variables:
            os.environ.pop(self._own_variables.pop(), None)

    def is_connection_error(self, error: BaseException) -> bool:
        import tensorflow as tf

        if isinstance(error, MeetingFailed):
            return True
        text = str(error).lower()
        return (
            isinstance(error, tf.errors.OpError)
            and any(phrase in text for phrase in _BROKEN)
            and _FROM_PYTHON not in text
            and is_of(error, ["tensorflow", "keras", "tf_keras"])
        )


_STRATEGY: Any = None


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


def free_address(rendezvous: Rendezvous) -> str:
    """Where this rank could listen; on a single node that is the loopback address."""
    host = rendezvous.address if rendezvous.on_one_node else _own_address()
    return f"{host}:{_free_port()}"


def announce(addresses: list[str], world: World) -> list[str]:
    """Sets `TF_CONFIG` and returns the names of the variables that it set."""
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": world.rank}}
    os.environ[_TF_CONFIG] = json.dumps(config)
    return [_TF_CONFIG]


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
