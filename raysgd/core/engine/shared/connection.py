"""The interface of connections, and the one that connects nothing."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from raysgd.core.engine.shared.types import Rendezvous, World

FORM_TIMEOUT_S = 120.0
"""Default time for ranks to form a group. They have all started by then."""


class Connection(ABC):
    """Connects one worker with the others of its group. All methods run in the worker."""

    def limit_threads(self, num_threads: int) -> None:
        """Limit the threads of numerical libraries, if possible before these libraries are imported."""
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(num_threads)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(num_threads)

    @abstractmethod
    def load(self) -> None:
        """Import the framework in a process of the worker's own. All workers do it at the same time."""

    def load_in_driver(self) -> None:
        """Import the framework in a driver that is itself a worker."""
        self.load()

    def use_gpus(self, gpu_ids: Sequence[str]) -> None:  # noqa: B027 - only GPU frameworks have to do something
        """Compute on these GPUs, which are reserved for a driver that is itself a worker.

        Remote workers do not need this, because they see only their own GPUs.
        """

    @property
    def opens_for_any_rank(self) -> bool:
        """True if `open_endpoint` works the same for every rank. The rank need not be known then."""
        return False

    @property
    def listens_alone(self) -> bool:
        """True if even a driver that is the only worker has to open an endpoint."""
        return False

    @abstractmethod
    def open_endpoint(self, host: str, rank: int) -> int:
        """Start listening for the other ranks of the next group, if needed, and return the port.

        The number may have more bits than a port. Only `join` understands them: see `Rendezvous`.

        Args:
            host: Address of this machine to listen at. Whoever cannot reach that address cannot connect.
            rank: The rank in the next group. Any number if `opens_for_any_rank`.
        """

    @abstractmethod
    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Join the group. Return when all ranks have joined.

        Args:
            rendezvous: The addresses of all ranks. This rank's is the endpoint that it opened.
            world: This worker's place.
            even_alone: True to form a group even for a single rank. A model that was wrapped for a group needs one.
        """

    def interrupt(self) -> None:  # noqa: B027 - most connections have nothing to interrupt
        """Break the group: end all waits for other ranks, in `join` and in collectives. Called from another thread.

        Without it, ranks that wait for a lost one cannot be kept.
        """

    def give_up(self, error: BaseException) -> None:
        """End the exchanges in which other ranks may wait for this one. Called when a call fails with a broken group.

        Args:
            error: The error of the call.
        """
        self.interrupt()

    @abstractmethod
    def leave(self) -> None:
        """Leave the group, and let ranks that still wait for this one know. Safe if never joined, or broken."""

    def leave_for_another(self) -> None:
        """Leave the group just before joining another one. May postpone cleanup."""
        self.leave()

    @abstractmethod
    def is_connection_error(self, error: BaseException) -> bool:
        """Return True if an exception raised in this process means that the group is broken.

        Called while the exception still has its traceback. An error of user code, such as a lost connection to a
        database, must not be taken for a broken group, because the call would then be retried.
        """


class NoConnection(Connection):
    """Connects nothing: the workers run independently."""

    def load(self) -> None:
        """Do nothing: there is no framework to import."""

    def open_endpoint(self, host: str, rank: int) -> int:
        return 0

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Do nothing: there is no group."""

    def leave(self) -> None:
        """Do nothing: there is no group."""

    def is_connection_error(self, error: BaseException) -> bool:
        return False
