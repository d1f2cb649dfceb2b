"""Checkpoints on their way from a worker to where they stay: one at a time, in a thread of the driver.

Why a checkpoint is copied first and fetched later: ADR 94.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_ARRIVAL_S = 10.0
"""How long a checkpoint that is on its way at a loss is waited for. One that a dead worker was sending ends at once; a
frozen worker may never send the rest."""


class CheckpointLostError(Exception):
    """A checkpoint was lost together with the worker that was sending it. The run goes on from the one before."""


class CheckpointTaker(ABC):
    """Takes the checkpoints of a run, one after the other, in a thread, so that no one waits for them.

    Attributes:
        next_index: What a worker that stores a checkpoint itself numbers it by; None where no worker does.

    Args:
        restart_point: What the run starts from; None to start from the beginning.
    """

    next_index: int | None = None

    def __init__(self, restart_point: Any = None) -> None:
        self._restart_point = restart_point
        self._num_landed = self._num_counted = 0
        self._thread: threading.Thread | None = None
        self._has_arrived = threading.Event()
        self._error: BaseException | None = None
        self._identity = 0

    @abstractmethod
    def add(self, score: Any, receive: Callable[[], dict[str, Any]] | None) -> None:
        """Takes a checkpoint; `receive` gets it from the worker, None where the workers have stored it."""

    def begin_attempt(self) -> None:  # noqa: B027 - it may stay empty
        """The function is about to start on all workers, for the first time or again."""

    @property
    def restart_point(self) -> Any:
        """The checkpoint that a function is started again from: the newest one, or what the run started from."""
        self.flush()
        return self._restart_point

    def take_landing(self) -> bool:
        """Return whether a checkpoint has come to where it stays since this was asked last.

        One that is on its way is waited for: whether a loss came behind a checkpoint does not depend on how quick the
        driver was. What went wrong with it stays for `flush`.
        """
        if self._thread is not None and self._has_arrived.wait(_ARRIVAL_S):
            self._thread.join()
        counted, self._num_counted = self._num_counted, self._num_landed
        return self._num_landed > counted

    def await_arrival(self, timeout_s: float) -> None:
        """Waits until nothing is on its way from a worker any more, whatever became of it; not until it is written."""
        if self._thread is not None and not self._has_arrived.wait(timeout_s):
            logger.warning(
                "checkpoint %s did not arrive within %g s; stopping its worker anyway", self._identity, timeout_s
            )

    def flush(self) -> None:
        """Waits until what is on its way has arrived and is written.

        Raises:
            Exception: What went wrong with it, an `OSError` when it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _receive(
        self,
        identity: int,
        receive: Callable[[], dict[str, Any]],
        keep: Callable[[dict[str, Any]], None],
        lose: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to get a checkpoint. Nothing else may be on its way: call `flush` first.

        Args:
            identity: Its number.
            receive: Gets it; raises `CheckpointLostError` when it was lost.
            keep: Called with it, in the same thread.
            lose: Called instead when it did not come.
        """
        self._identity = identity
        self._has_arrived.clear()
        self._thread = threading.Thread(
            target=self._land, args=(receive, keep, lose), name="raysgd-checkpoint", daemon=True
        )
        self._thread.start()

    def _land(
        self,
        receive: Callable[[], dict[str, Any]],
        keep: Callable[[dict[str, Any]], None],
        lose: Callable[[], None],
    ) -> None:
        try:
            try:
                checkpoint = receive()
            except BaseException:
                lose()
                raise
            finally:
                self._has_arrived.set()
            keep(checkpoint)
        except CheckpointLostError as error:
            logger.warning("checkpoint %s was lost with its worker: %s", self._identity, error)
        except BaseException as error:
            self._error = error

    def _note_landing(self, restart_point: Any) -> None:
        """A checkpoint has come to where it stays: a function that is started again goes on from it."""
        self._restart_point = restart_point
        self._num_landed += 1
