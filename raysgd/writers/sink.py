"""`Sink`, the interface of what writes metrics, and `SafeSink`, which lets none of its failures end a training."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from raysgd._text.log_lines import Once
from raysgd._text.secrets import masked
from raysgd.exceptions import OnFailure


class LoggedRun(Protocol):
    """The run whose metrics are written, as far as a sink wants to know it."""

    @property
    def folder(self) -> Path:
        """The folder of the run. A sink that writes elsewhere does not ask for it, because asking may make it."""

    @property
    def config(self) -> Any:
        """The config of the run."""

    @property
    def name(self) -> str | None:
        """The name of the run."""


@dataclass(frozen=True)
class RunInFolder:
    """A run of which there is little to tell."""

    folder: Path
    config: Any = None
    name: str | None = None


class Sink(ABC):
    """Writes the rows of a run to one place in one format. Every method raises what goes wrong.

    Until it is opened it is plain data: it can be copied, and pickled.
    """

    @abstractmethod
    def open(self, run: LoggedRun, first_step: int | None = None) -> None:
        """Begin with a run.

        Args:
            run: The run.
            first_step: The step that the run goes on from: what was written of later ones is not of this run. 0 for a
                run that begins; None if all stays that is there.
        """

    @abstractmethod
    def write(self, row: Any, step: int) -> None:
        """Write one row of metrics."""

    def close(self, *, has_failed: bool = False) -> None:  # noqa: B027
        """End it; also one that could be opened by half only. A sink may be opened again for the next run.

        Args:
            has_failed: Whether the run has failed.
        """


class FileSink(Sink):
    """Writes one file, in which a row is whole when `write` returns.

    Args:
        name: The file: an absolute path, or a name in the folder of the run.

    Attributes:
        path: The file; before there is a run, what it was given as.
    """

    def __init__(self, name: str | Path) -> None:
        self._name = self.path = Path(name)

    def open(self, run: LoggedRun, first_step: int | None = None) -> None:
        self.path = place_in(run, self._name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin(first_step)

    @abstractmethod
    def _begin(self, first_step: int | None) -> None:
        """Make the file, or leave in it what stays."""


def place_in(run: LoggedRun, name: Path) -> Path:
    """Return a place in the folder of a run, or an absolute one as it is."""
    return name if name.is_absolute() else run.folder / name


class SafeSink:
    """A sink whose failures are warnings, one for each kind of error: it goes on with what can be written.

    Args:
        sink: What writes.
        owner: What the user calls it, for the warnings.
        hidden: Metrics that are not written.
    """

    def __init__(self, sink: Sink, owner: str, hidden: Collection[str] = ()) -> None:
        self._sink, self._hidden = sink, hidden
        self.failures = FailureWarnings(owner)
        self._run: LoggedRun | None = None
        self._first_step: int | None = None
        self._is_open = False

    def open(self, run: LoggedRun, first_step: int | None = None) -> None:
        """Open the sink.

        Raises:
            Exception: It cannot be opened. Each row tries again.
        """
        self._run, self._first_step, self._is_open = run, first_step, False
        self._open_once()

    def write(self, row: Any, step: int) -> None:
        """Write one row, or warn."""
        with self.failures.instead():
            self._open_once()
            shown = {name: row[name] for name in row if name not in self._hidden} if self._hidden else row
            self._sink.write(shown, step)

    def close(self, *, has_failed: bool = False) -> None:
        """Close what was opened, or warn."""
        with self.failures.instead():
            if self._is_open:
                self._is_open, self._run = False, None
                self._sink.close(has_failed=has_failed)

    def _open_once(self) -> None:
        if self._is_open:
            return
        assert self._run is not None, "a sink is opened before it is written to"

        def end() -> None:
            with suppress(Exception):  # of what may be open by half
                self._sink.close(has_failed=True)

        with OnFailure(end):
            self._sink.open(self._run, self._first_step)
        self._is_open = True


logger = logging.getLogger(__name__)


class FailureWarnings:
    """Turns what fails into warnings, one for each kind of error.

    Args:
        owner: What fails, as the user calls it.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._once = Once()

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Warn instead of raising what the block raises, and leave out the rest of the block."""
        try:
            yield
        except Exception as error:  # of a disk, of a service, or a mistake: days of training do not end for it
            kind = type(error).__name__
            if self._once.is_first(kind):
                logger.warning(
                    "%s: could not write (%s: %s); the run continues, and it tries again with the next result",
                    self._owner,
                    kind,
                    masked(str(error)),
                )
