"""Checkpoints on their way from a worker to where they stay: one at a time, in a thread of the driver.

Why a checkpoint is copied first and fetched later: ADR 41.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_ARRIVAL_S = 10.0
"""How long a checkpoint that is on its way at a loss is waited for. One that a dead worker was sending ends at once; a
frozen worker may never send the rest."""


class CheckpointLostError(Exception):
    """A checkpoint was lost together with the worker that was sending it. The run goes on from the one before."""


class CheckpointTaker(Protocol):
    """What a run of a function needs of whatever takes its checkpoints.

    Attributes:
        next_index: What a worker that stores a checkpoint itself numbers it by; None where no worker does.
        restart_point: What a function that is started again goes on from; None to start from the beginning.
        num_landed: How many checkpoints have come to where they stay.
    """

    @property
    def next_index(self) -> int | None: ...

    @property
    def restart_point(self) -> Any: ...

    @property
    def num_landed(self) -> int: ...

    def begin_attempt(self) -> None:
        """The function is about to start on all workers, for the first time or again."""

    def add(self, score: Any, receive: Callable[[], dict[str, Any]] | None) -> None:
        """Takes a checkpoint; `receive` gets it from the worker, None where the workers have stored it."""

    def flush(self) -> None:
        """Waits until what is on its way has arrived and is written."""

    def await_arrival(self, timeout_s: float) -> None:
        """Waits until nothing is on its way from a worker any more."""

    def settle(self, timeout_s: float) -> None:
        """Waits until what arrives in time is written; errors stay for `flush`."""


class NewLandings:
    """Says, once, whether a checkpoint has landed since it was asked last.

    One that is on its way is waited for: whether a loss came behind a checkpoint does not depend on how quick the
    driver was.

    Args:
        checkpoints: Takes the checkpoints.
    """

    def __init__(self, checkpoints: CheckpointTaker) -> None:
        self._checkpoints = checkpoints
        self._num_counted = 0

    def __call__(self) -> bool:
        self._checkpoints.settle(_ARRIVAL_S)
        counted, self._num_counted = self._num_counted, self._checkpoints.num_landed
        return self._num_counted > counted


class Arrivals:
    """Gets one checkpoint after the other in a thread, so that no one waits for it."""

    def __init__(self) -> None:
        self._landing: threading.Thread | None = None
        self._has_arrived = threading.Event()
        self._error: BaseException | None = None
        self._identity = 0

    def begin(
        self, identity: int, receive: Callable[[], dict[str, Any]], keep: Callable[[dict[str, Any]], None]
    ) -> None:
        """Starts to get a checkpoint. Nothing else may be on its way: call `flush` first.

        Args:
            identity: Its number.
            receive: Gets it; raises `CheckpointLostError` when it was lost.
            keep: Called with it, in the same thread.
        """
        self._identity = identity
        self._has_arrived.clear()
        self._landing = threading.Thread(
            target=self._land, args=(identity, receive, keep), name="raysgd-checkpoint", daemon=True
        )
        self._landing.start()

    def _land(
        self, identity: int, receive: Callable[[], dict[str, Any]], keep: Callable[[dict[str, Any]], None]
    ) -> None:
        try:
            try:
                checkpoint = receive()
            finally:
                self._has_arrived.set()
            keep(checkpoint)
        except CheckpointLostError as error:
            logger.warning("checkpoint %s was lost with its worker: %s", identity, error)
        except BaseException as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        """Whether the last one that has begun is where it stays, or was lost, or failed."""
        return self._landing is None or not self._landing.is_alive()

    def await_arrival(self, timeout_s: float) -> None:
        """Waits until nothing is on its way from a worker any more, whatever became of it; not until it is written."""
        if self._landing is not None and not self._has_arrived.wait(timeout_s):
            logger.warning(
                "checkpoint %s did not arrive within %g s; stopping its worker anyway", self._identity, timeout_s
            )

    def settle(self, timeout_s: float) -> None:
        """Waits until what arrives in time is written; errors stay for `flush`."""
        if self._landing is not None and self._has_arrived.wait(timeout_s):
            self._landing.join()

    def flush(self) -> None:
        """Waits until what is on its way has arrived and is written.

        Raises:
            Exception: What went wrong with it, an `OSError` when it could not be written.
        """
        if self._landing is not None:
            self._landing.join()
            self._landing = None
        error, self._error = self._error, None
        if error is not None:
            raise error
