"""The protocol of all connections."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from raysgd.engine.shared.types import Rendezvous, World

FORM_TIMEOUT_S = 120.0
"""The time that ranks have to form a group, unless they are told otherwise. All are there already, and ready."""


class Connection(ABC):
    """Connects the workers of a group with each other, and ends that. All methods run in the worker."""

    def limit_threads(self, num_threads: int) -> None:
        """Tell numerical libraries how many threads to use, before they are imported where that is still possible."""
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(num_threads)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(num_threads)

    @abstractmethod
    def load(self) -> None:
        """Import the framework, so that all workers pay for it at the same time, in a process of the worker's own."""

    def load_in_driver(self) -> None:
        """Import the framework in a driver that is a worker itself."""
        self.load()

    def use_gpus(self, gpu_ids: Sequence[str]) -> None:  # noqa: B027 - only GPU frameworks have to do something
        """Compute on the GPUs with these ids, in a driver that is a worker itself; they are held for it.

        Remote workers see their own GPUs only, so they need not be told.
        """

    @property
    def opens_for_any_rank(self) -> bool:
        """True if `open_endpoint` does the same for each rank, so that it can be called before the rank is known."""
        return False

    @property
    def listens_alone(self) -> bool:
        """True if a driver that is the only worker has to open an endpoint, too, though no other rank looks for it."""
        return False

    @abstractmethod
    def open_endpoint(self, host: str, rank: int) -> int:
        """Begin to listen for the other ranks of the next group, where this one needs to; return the port.

        The number may have more bits, which only `join` understands: see `Rendezvous`.

        Args:
            host: Under which address of this machine; who cannot reach it does not get in.
            rank: The place in that group; any where `opens_for_any_rank`.
        """

    @abstractmethod
    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """Join the group; return when all ranks did.

        Args:
            rendezvous: Where the ranks listen, this one where it opened its endpoint.
            world: This worker's place.
            even_alone: Whether to form a group also of a single rank. A model that was wrapped for a group needs one.
        """

    def interrupt(self) -> None:  # noqa: B027 - most connections have nothing to interrupt
        """From another thread: ends all waiting for other ranks, in `join` and in collectives, and so breaks the group.

        A connection that cannot do it loses such ranks where others could be kept.
        """

    def give_up(self, error: BaseException) -> None:
        """Called when a call ends because the group broke: ends what other ranks may be waiting for this one in.

        Args:
            error: What the call raised.
        """
        self.interrupt()

    @abstractmethod
    def leave(self) -> None:
        """Leave the group, and let ranks that still wait for this one know. Harmless when never joined, or broken."""

    def leave_for_another(self) -> None:
        """Do what `leave` does where another group is joined at once: what may wait can be done later."""
        self.leave()

    @abstractmethod
    def is_connection_error(self, error: BaseException) -> bool:
        """Return whether an exception raised in this process means that the group is broken, not the user's code.

        It is asked while the exception has its traceback. An error of user code, such as a lost connection to a
        database, must not be taken for one of the group: it is never retried.
        """


class NoConnection(Connection):
    """Connects nothing: the workers run side by side."""

    def load(self) -> None:
        """There is no framework to import."""

    def open_endpoint(self, host: str, rank: int) -> int:
        return 0

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        """There is nothing to join."""

    def leave(self) -> None:
        """There is nothing to leave."""

    def is_connection_error(self, error: BaseException) -> bool:
        return False
