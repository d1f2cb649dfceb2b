"""Goes over what a running function reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from raysgd.exceptions import InactiveWorkerGroupError
from raysgd.train.executor import BackendExecutor

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TrainingIterator:
    """Goes over what a running function reports. The function waits for it, one report ahead at most."""

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor
        self._run = executor.current_run
        self._is_finished = False
        self._final: list[Any] | None = None

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        """Itself."""
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """The metrics of all workers at their next report, by rank."""
        if self._is_finished:
            raise StopIteration
        results = self._finished_unless_fine(self._executor.fetch_next_result)
        if results is not None:
            return results
        self._finish()
        raise StopIteration

    def is_finished(self) -> bool:
        """Return whether the function has ended everywhere, or the run was given up."""
        return self._is_finished

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Return what the function returned, by rank; None when the run was given up.

        Args:
            force: Whether to let a function that still runs come to its end, without its reports. Otherwise the result
                is None.
        """
        if not self._is_finished and not force:
            logger.info("the function still runs: iterate to its end first, or use `get_final_results(force=True)`")
            return None
        if not self._is_finished:
            self._finish()
        return self._final

    def _finish(self) -> None:
        self._final = self._finished_unless_fine(self._executor.finish_training)
        self._is_finished = True

    def _finished_unless_fine(self, call: Callable[[], T]) -> T:
        try:
            self._check_current()
            return call()
        except BaseException:
            self._is_finished = True
            raise

    def _check_current(self) -> None:
        if not self._executor.is_started or self._executor.current_run is not self._run:
            raise InactiveWorkerGroupError(
                "The trainer was shut down, or began another run, after this iterator was created."
            )
