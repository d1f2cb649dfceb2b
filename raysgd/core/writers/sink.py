"""The interface of classes that write metrics (sinks), and a wrapper that turns their failures into warnings."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd.core.files import inside
from raysgd.core.text.log_lines import Once
from raysgd.core.text.secrets import masked
from raysgd.exceptions import OnFailure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInFolder:
    """A stand-in for a run: a folder, a config and a name. It is for sinks that need no other part of a run."""

    folder: Path
    config: Any = None
    name: str | None = None


class Sink(ABC):
    """Writes a run's rows of metrics to one destination in one format. Methods raise errors instead of logging them.

    Before `open`, a sink is plain data that can be copied and pickled.
    """

    @abstractmethod
    def open(self, run: Any, first_step: int | None = None) -> None:
        """Start writing for a run.

        Args:
            run: The run, with the attributes `folder`, `config` and `name`. A sink that does not write to the folder
                must not read `folder`, because reading it may create the folder.
            first_step: The epoch, or the `training_iteration`, from which the run continues. Later rows in the
                destination come from a previous run. Sinks that can remove rows remove them. 0 for a new run. None to
                keep all rows.
        """

    @abstractmethod
    def write(self, row: Any, step: int) -> None:
        """Write one row of metrics to the destination."""

    def close(self, *, has_failed: bool = False) -> None:  # noqa: B027
        """Close the sink, even if `open` failed halfway. The sink may be opened again for the next run.

        Args:
            has_failed: True if the run has failed.
        """


class FileSink(Sink):
    """Base class of sinks that write one file. When `write` returns, the row is completely in the file.

    Args:
        name: The file: an absolute path, or a name in the run's folder.

    Attributes:
        path: The file's path. Before `open`, the file's name.
        last_step: If a run continues in the middle of an epoch, rows of that epoch are kept up to this step. None to
            keep no rows of that epoch.
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
        """Create the file. If the file exists, remove the rows after `first_step`.

        Args:
            first_step: The epoch, or the `training_iteration`, from which the run continues. See `Sink.open`.
        """


def place_in(run: Any, name: Path) -> Path:
    """Return the path of a file in a run's folder. If `name` is an absolute path, return it unchanged.

    Raises:
        OSError: A link leads out of the run's folder.
    """
    return name if name.is_absolute() else inside(run.folder, name)


class SafeSink:
    """Wraps a sink so that failed writes become warnings, one per error type. Later rows are still written.

    Errors in `close` become warnings, too.

    Args:
        sink: The sink to write to.
        owner: Name by which warnings refer to the sink.
        hidden: Names of metrics that are not written.
    """

    def __init__(self, sink: Sink, owner: str, hidden: Collection[str] = ()) -> None:
        self._sink, self._hidden = sink, hidden
        self._owner, self._warned = owner, Once()
        self._run: Any = None
        self._first_step: int | None = None
        self._is_open = False

    def warns(self) -> AbstractContextManager[None]:
        """Return a context manager that turns an exception raised in the `with` block into a warning."""
        return failures_warned(self._owner, self._warned)

    def open(self, run: Any, first_step: int | None = None) -> None:
        """Open the wrapped sink.

        Raises:
            Exception: The sink cannot be opened. Each later `write` tries to open it again.
        """
        self.begin(run, first_step)
        self._open_once()

    def begin(self, run: Any, first_step: int | None = None) -> None:
        """Set the run without opening the wrapped sink. The first `write` opens the sink."""
        self._run, self._first_step, self._is_open = run, first_step, False

    def write(self, row: Any, step: int) -> None:
        """Write one row to the wrapped sink. If that fails, log a warning."""
        with self.warns():
            self._open_once()
            shown = {name: row[name] for name in row if name not in self._hidden} if self._hidden else row
            self._sink.write(shown, step)

    def close(self, *, has_failed: bool = False) -> None:
        """Close the wrapped sink if it is open. If that fails, log a warning."""
        with self.warns():
            if self._is_open:
                self._is_open, self._run = False, None
                self._sink.close(has_failed=has_failed)

    def _open_once(self) -> None:
        if self._is_open:
            return
        assert self._run is not None, "a sink is opened before it is written to"

        def end() -> None:
            with suppress(Exception):  # the sink may be half open, so closing it may fail
                self._sink.close(has_failed=True)

        with OnFailure(end):
            self._sink.open(self._run, self._first_step)
        self._is_open = True


@contextmanager
def failures_warned(owner: str, warned: Once) -> Iterator[None]:
    """Turn an exception raised in the `with` block into a warning, once per error type.

    Args:
        owner: Name by which the warning refers to the failing object.
        warned: Remembers for which error types a warning was logged.
    """
    try:
        yield
    except Exception as error:  # no error, whether caused by a disk, a service or a bug, may end a long run
        kind = type(error).__name__
        if warned.is_first(kind):
            logger.warning(
                "%s: could not write (%s: %s); the run continues, and the next result is tried again",
                owner,
                kind,
                masked(str(error)),
            )
