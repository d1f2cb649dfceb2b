"""A worker in the driver itself: `use_local=True`.

It answers to the same methods as a remote one, but a call runs when it is gathered, in the driver's own thread, so
that a debugger stops where the user wants it to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd.engine.processes.worker import WorkerFailed, WorkerProcess
from raysgd.engine.shared.connection import Connection
from raysgd.engine.shared.types import Failure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalCall:
    """A call that waits to be run; `run` returns its value or its failure."""

    function: Callable[[], Any]

    def run(self) -> tuple[Any, Failure | None]:
        """The value, or the failure, whose exception still has the live traceback that a debugger can use."""
        try:
            return self.function(), None
        except WorkerFailed as carrier:
            return None, carrier.failure


class LocalWorker:
    """The driver's handle on the worker in its own process."""

    is_local = True

    def __init__(self, connection: Connection) -> None:
        # The number of threads of the driver is the user's business.
        self._process = WorkerProcess(connection, num_threads=None, is_remote=False)

    def submit(self, method: str, *args: Any) -> LocalCall:
        """Notes the call; nothing runs yet."""
        return LocalCall(lambda: getattr(self._process, method)(*args))

    def interrupt(self) -> None:
        """From another thread: frees a worker that waits for the others to join."""
        self._process.interrupt()

    @property
    def replica(self) -> Any:
        """The live replica."""
        return self._process.replica

    def kill(self) -> None:
        """Closes it; a process cannot kill itself and live on. What goes wrong is logged: the others must end too."""
        try:
            self._process.close()
        except Exception as error:
            logger.warning("the worker in the driver failed to close: %r", error)
