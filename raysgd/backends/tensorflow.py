"""How TensorFlow replicas are connected: by sockets of raysgd's own, or by TensorFlow's own strategy.

Both set `TF_CONFIG` in each worker of a group of several, as TensorFlow documents it, so that code which reads its rank
from there finds it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from raysgd.backends._guests import MeetingFailed, Patience
from raysgd.backends._meeting import Meeting
from raysgd.backends._mesh import Door, Mesh, MeshBroken, host_of
from raysgd.backends._origins import is_of, with_causes
from raysgd.backends.base import Backend
from raysgd.backends.group import Group, Votes
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
class _MeetingBackend(Backend):
    """Ranks that load TensorFlow and meet to learn one another's addresses.

    Attributes:
        timeout_s: How long to wait for the other ranks.
        variables: Environment variables to set in remote workers before TensorFlow is imported.
    """

    timeout_s: float = 1800.0
    variables: Mapping[str, str] = field(default_factory=dict)
    _num_threads: int | None = field(default=None, repr=False, compare=False)
    _meeting: Meeting | None = field(default=None, repr=False, compare=False)
    _is_interrupted: bool = field(default=False, repr=False, compare=False)
    _own_variables: list[str] = field(default_factory=list, repr=False, compare=False)

    def limit_threads(self, num_threads: int) -> None:
        super().limit_threads(num_threads)
        self._num_threads = num_threads

    def load(self) -> None:
        load_tensorflow(self.variables, self._num_threads)

    def open_rendezvous(self) -> int:
        self._meeting = Meeting()
        return self._meeting.open()

    def interrupt(self) -> None:
        self._is_interrupted = True

    def leave(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        self._meeting, self._is_interrupted = None, False
        while self._own_variables:
            os.environ.pop(self._own_variables.pop(), None)

    def _patience(self) -> Patience:
        return Patience(self.timeout_s, lambda: self._is_interrupted)

    def _meet(
        self, rendezvous: Rendezvous, world: World, word: Mapping[str, Any], patience: Patience
    ) -> list[dict[str, Any]]:
        """What every rank says, by rank. Sets `TF_CONFIG`."""
        own = json.dumps({"address": free_address(rendezvous), **word})
        said = (self._meeting or Meeting()).exchange(rendezvous, world.rank, world.size, own, patience)
        words: list[dict[str, Any]] = [json.loads(each) for each in said]
        self._own_variables += announce([each["address"] for each in words], world)
        return words


@dataclass
class TensorFlowBackend(_MeetingBackend):
    """Replicas that each have a TensorFlow of their own, and exchange numbers over connections of raysgd's own."""

    _lanes: list[Mesh] = field(default_factory=list, repr=False, compare=False)

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
        patience = self._patience()
        with closing(Door(rendezvous)) as door:
            words = self._meet(rendezvous, world, {"door": door.invitation}, patience)
            self._lanes = door.connect(world.rank, [word["door"] for word in words], 2, patience)
        patience.check()  # an interrupt that came before there was anything to cut
        gradients, votes = self._lanes
        _JOINED = Joined(Group(world, gradients), Votes(world, votes))

    def interrupt(self) -> None:
        super().interrupt()
        for lane in self._lanes:
            lane.interrupt()

    def leave(self) -> None:
        global _JOINED
        for lane in self._lanes:
            lane.close()
        if self._lanes:
            _JOINED = None
        self._lanes = []
        super().leave()

    def is_connection_error(self, error: BaseException) -> bool:
        return any(isinstance(link, MeshBroken | MeetingFailed) for link in with_causes(error))


@dataclass
class MultiWorkerBackend(_MeetingBackend):
    """One `MultiWorkerMirroredStrategy` over all workers. A process can join one group in its life."""

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Meets the others to learn their addresses, and makes the strategy; returns when all ranks did."""
        global _STRATEGY
        if not world.is_distributed:
            return
        self._meet(rendezvous, world, {}, self._patience())
        import tensorflow as tf

        _STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()

    def leave(self) -> None:
        """Takes the variables back. TensorFlow keeps its servers until the process ends."""
        global _STRATEGY
        _STRATEGY = None
        super().leave()

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


@dataclass(frozen=True)
class Joined:
    """What the ranks of a group exchange with each other.

    Attributes:
        group: Gradients, metrics and states.
        votes: Which ranks have data left: asked for, and answered, while gradients are on their way.
    """

    group: Group
    votes: Votes


_JOINED: Joined | None = None
_STRATEGY: Any = None


def group_of(world: World) -> Group:
    """What a rank at this place exchanges gradients through, in the group that this process joined.

    Before it has joined one, as a worker that is made ready to step in, it is alone wherever its place will be.
    """
    return _JOINED.group if world.is_distributed and _JOINED is not None else Group(World(0, 1))


def votes() -> Votes:
    """The votes of the group that this process joined as one of several ranks."""
    assert _JOINED is not None, "a rank that is alone has nobody to ask"
    return _JOINED.votes


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
    """Where this rank could listen."""
    return f"{host_of(rendezvous)}:{_free_port()}"


def announce(addresses: list[str], world: World) -> list[str]:
    """Sets `TF_CONFIG` and returns the names of the variables that it set."""
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": world.rank}}
    os.environ[_TF_CONFIG] = json.dumps(config)
    return [_TF_CONFIG]


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
