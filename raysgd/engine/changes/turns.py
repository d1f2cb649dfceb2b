"""Calls from several threads come one after the other, and any thread may stop them all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from raysgd.engine.changes.lifecycle import Lifecycle
from raysgd.exceptions import TrainerShutdownError

logger = logging.getLogger(__name__)


class Turns:
    """Gives each thread its turn with the group of a lifecycle."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._lock = lifecycle.make_lock()
        self._num_inside = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """One thread after the other. What fails after `stop` fails because of that, and the group ends here.

        Raises:
            TrainerShutdownError: After `stop`, or when another thread calls that meanwhile.
        """
        with self._lock:
            self._num_inside += 1
            try:
                self._lifecycle.check_active()
                with self._telling_of_shutdown():
                    yield
            finally:
                self._num_inside -= 1
                if self._lifecycle.is_stopped:
                    self._lifecycle.stop_group(force=True)

    @contextmanager
    def _telling_of_shutdown(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._lifecycle.is_stopped:
                raise
            message = (
                "The trainer was shut down while this call was running, so the call did not finish. "
                f"{self._lifecycle.spec.words.when_interrupted}"
            )
            cause = error if not isinstance(error, TrainerShutdownError) else None
            raise TrainerShutdownError(message.rstrip()) from cause

    def stop(self, force: bool) -> None:
        """Stops everything, from any thread; a call that is running then raises. A second time it does nothing."""
        lifecycle = self._lifecycle
        if lifecycle.is_stopped:
            return
        lifecycle.refuse_starts()
        if self._num_inside:
            force = True
            lifecycle.kill_workers()
        if not self._lock.acquire(timeout=self._timeout_s):
            logger.warning("a call is running in this process; its worker stops when the call ends")
            return
        try:
            lifecycle.stop_group(force=force)
        finally:
            self._lock.release()

    @property
    def _timeout_s(self) -> float:
        """How long to wait for a call whose workers were killed. One in this process does not end any sooner."""
        group = self._lifecycle.group
        return 0.0 if group is not None and group.is_driver_only else self._lifecycle.release_timeout_s
