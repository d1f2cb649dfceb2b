"""The interface through which workers connect for collectives, and a connection for workers that run independently."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from raysgd.core.engine.shared.types import Rendezvous, World

FORM_TIMEOUT_S = 120.0
"""Default timeout for started ranks to form a group, in seconds."""


class Connection(ABC):
    """Connects one worker with the other workers of its group, for example in a PyTorch process group.

    All methods run in the worker's process.
    """

    def limit_threads(self, num_threads: int) -> None:
        """Limit the number of threads of numerical libraries. This works best before the libraries are imported."""
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(num_threads)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(num_threads)

    @abstractmethod
    def load(self) -> None:
        """Import the framework in a remote worker's process. The workers of a new group do this at the same time."""

    def load_in_driver(self) -> None:
        """Import the framework in the driver. Called if the driver itself is a worker (`use_local=True`)."""
        self.load()

    def use_gpus(self, gpu_ids: Sequence[str]) -> None:  # noqa: B027 - only GPU frameworks have to do something
        """If the driver itself is a worker, restrict it to the GPUs that are reserved for it.

        Remote workers do not need this, because Ray shows each of them only its assigned GPUs.

        Args:
            gpu_ids: IDs of the reserved GPUs.
        """

    @property
    def opens_for_any_rank(self) -> bool:
        """True if `open_endpoint` does not depend on the rank and may be called before the rank is known."""
        return False

    @abstractmethod
    def open_endpoint(self, host: str, rank: int) -> int:
        """Start listening for the other ranks of the next group, and return the endpoint's number.

        The number contains the port, and may have further bits: see `PORT_BITS`. A rank to which no other rank connects
        need not listen, and returns any number.

        Args:
            host: Address of this machine to listen on. Only ranks that can reach this address can connect.
            rank: This worker's rank in the next group. May be any number if `opens_for_any_rank` is True.
        """

    @abstractmethod
    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Connect to the other ranks of the group. Return when all ranks are connected.

        Args:
            rendezvous: The addresses of all ranks. This rank's address is the endpoint that it opened.
            world: This worker's rank, group size and so on.
            even_alone: True to form a group even for a single rank. A model wrapped for data parallelism requires this.
        """

    def interrupt(self) -> None:  # noqa: B027 - most connections have nothing to interrupt
        """Abort `join` and all collectives of this rank. Afterwards, the group is unusable.

        May be called from any thread. If a connection class does not override this method, ranks that wait for a lost
        rank can only be restarted.
        """

    def give_up(self, error: BaseException) -> None:
        """Abort this rank's communication after a connection error, so that no other rank waits for this rank.

        Args:
            error: The exception that the call raised.
        """
        self.interrupt()

    @abstractmethod
    def leave(self) -> None:
        """Leave the group, and let ranks that still wait for this rank notice that it has left.

        This method may be called even if the worker has not joined a group or the group is broken.
        """

    def leave_for_another(self) -> None:
        """Leave the group in order to join another group. Unlike `leave`, this method may postpone cleanup."""
        self.leave()

    @abstractmethod
    def is_connection_error(self, error: BaseException) -> bool:
        """Return True if an exception raised in this process means that the connections of the group are broken.

        The exception must still have its traceback. Return False for errors of user code, such as a lost database
        connection: a call is retried if the group is broken, but an error of user code must be raised.
        """


class NoConnection(Connection):
    """A connection for workers that run independently of each other and never communicate."""

    def load(self) -> None:
        """Do nothing: there is no framework to import."""

    def open_endpoint(self, host: str, rank: int) -> int:
        return 0

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Do nothing: there is no group to join."""

    def leave(self) -> None:
        """Do nothing: there is no group to leave."""

    def is_connection_error(self, error: BaseException) -> bool:
        return False
