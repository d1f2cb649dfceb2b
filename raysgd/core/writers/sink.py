"""`Sink`, the interface of everything that writes metrics, and `SafeSink`, whose failures never end a training."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd.core.text.log_lines import Once
from raysgd.core.text.secrets import masked
from raysgd.exceptions import OnFailure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInFolder:
    """A minimal run, for sinks that only need a folder."""

    folder: Path
    config: Any = None
    name: str | None = None


class Sink(ABC):
    """Writes the rows of a run to one place in one format. Every method raises its errors.

    Before it is opened, it is plain data that can be copied and pickled.
    """

    @abstractmethod
    def open(self, run: Any, first_step: int | None = None) -> None:
        """Start writing for a run.

        Args:
            run: The run, with its `folder`, `config` and `name`. A sink that writes elsewhere does not read `folder`,
                because that may create it.
            first_step: The step from which the run continues; rows of later steps belong to another run and are
                removed. 0 for a new run. None to keep everything.
        """

    @abstractmethod
    def write(self, row: Any, step: int) -> None:
        """Write one row of metrics."""

    def close(self, *, has_failed: bool = False) -> None:  # noqa: B027
        """Close the sink, even one that is only half open. It may be opened again for the next run.

        Args:
            has_failed: True if the run has failed.
        """


class FileSink(Sink):
    """Writes one file. A row is complete when `write` returns.

    Args:
        name: The file: an absolute path, or a name in the folder of the run.

    Attributes:
        path: Path of the file; before `open`, the name.
        last_step: For rows with a step: the last step inside an epoch that was left whose row stays; None if none does.
    """

    last_step: int | None = None

    def __init__(self, name: str | Path) -> None:
        self._name = self.path = Path(name)

    def open(self, run: Any, first_step: int | None = None) -> None:
        self.path = place_in(run, self._name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin(first_step)

    @abstractmethod
    def _begin(self, first_step: int | None) -> None:
        """Create the file, or remove from it what the run does not continue."""


def place_in(run: Any, name: Path) -> Path:
    """Return a place in the folder of a run. An absolute path stays unchanged."""
    return name if name.is_absolute() else run.folder / name


class SafeSink:
    """A sink that warns of failures, once for each kind of error, and continues to write what it can.

    Args:
        sink: The sink that writes.
        owner: The user's name for it, for the warnings.
        hidden: Metrics that are not written.
    """

    def __init__(self, sink: Sink, owner: str, hidden: Collection[str] = ()) -> None:
        self._sink, self._hidden = sink, hidden
        self._owner, self._warned = owner, Once()
        self._run: Any = None
        self.first_step: int | None = None
        self._is_open = False

    def warns(self) -> AbstractContextManager[None]:
        """Return a context manager that turns an exception of its block into a warning."""
        return failures_warned(self._owner, self._warned)

    def open(self, run: Any, first_step: int | None = None) -> None:
        """Open the sink.

        Raises:
            Exception: It cannot be opened. Each row tries again.
        """
        self.begin(run, first_step)
        self._open_once()

    def begin(self, run: Any, first_step: int | None = None) -> None:
        """Set the run. The first row opens the sink."""
        self._run, self.first_step, self._is_open = run, first_step, False

    def write(self, row: Any, step: int) -> None:
        """Write one row, or warn."""
        with self.warns():
            self._open_once()
            shown = {name: row[name] for name in row if name not in self._hidden} if self._hidden else row
            self._sink.write(shown, step)

    def close(self, *, has_failed: bool = False) -> None:
        """Close the sink if it is open, or warn."""
        with self.warns():
            if self._is_open:
                self._is_open, self._run = False, None
                self._sink.close(has_failed=has_failed)

    def _open_once(self) -> None:
        if self._is_open:
            return
        assert self._run is not None, "a sink is opened before it is written to"

        def end() -> None:
            with suppress(Exception):  # the sink may be half open
                self._sink.close(has_failed=True)

        with OnFailure(end):
            self._sink.open(self._run, self.first_step)
        self._is_open = True


@contextmanager
def failures_warned(owner: str, warned: Once) -> Iterator[None]:
    """Turn an exception of the block into a warning, once for each kind of error.

    Args:
        owner: What fails, as the user calls it.
        warned: Remembers the kinds of errors of which it has warned.
    """
    try:
        yield
    except Exception as error:  # of a disk or a service, or a bug: it must not end days of training
        kind = type(error).__name__
        if warned.is_first(kind):
            logger.warning(
                "%s: could not write (%s: %s); the run continues, and the next result is tried again",
                owner,
                kind,
                masked(str(error)),
            )
