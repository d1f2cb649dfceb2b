"""`ServiceRun`: what all sinks share that write to a run of a service."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from raysgd._imports.optional import require
from raysgd._numbers.nested import flattened
from raysgd.writers.sink import LoggedRun, Sink


class ServiceRun(Sink):
    """Writes to a run of a service: the active one of this process, which it leaves open, or one that it starts.

    Args:
        package: The package of the service.
        extra: The extra of this distribution that installs it.
        purpose: Who needs it, for the error that it is missing.
        name: What a new run is called; None for the name of the run of this library.

    Attributes:
        run_id: The run. One that is set before `open` is continued, unless the run of this library is a new one.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """

    def __init__(self, package: str, extra: str, purpose: str, name: str | None = None) -> None:
        require(package, extra, purpose)
        self._package, self._extra, self._name = package, extra, name
        self.run_id: str | None = None
        self._run: Any = None
        self._is_own = False

    @property
    def _service(self) -> Any:
        """The package, which is not kept: a module cannot be copied."""
        return require(self._package, self._extra)

    def open(self, run: LoggedRun, first_step: int | None = None) -> None:
        self.run_id = self.run_id if first_step else None
        active = self._active()
        self._is_own = active is None
        self._run = self._start(run) if active is None else active

    def close(self, *, has_failed: bool = False) -> None:
        run, self._run = self._run, None
        if self._is_own and run is not None:
            self._end(run, has_failed)

    @abstractmethod
    def _active(self) -> Any:
        """Return the run that is active in this process; None if there is none."""

    @abstractmethod
    def _start(self, run: LoggedRun) -> Any:
        """Start a run; or go on with `run_id`, if there is one."""

    @abstractmethod
    def _end(self, started: Any, has_failed: bool) -> None:
        """End a run that was started here."""


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, also inside of dicts."""
    found = {}
    for name, value in flattened(metrics).items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found
