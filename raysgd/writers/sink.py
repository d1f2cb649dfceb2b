"""`Sink`, the interface of what writes metrics, and `SafeSink`, which lets none of its failures end a training."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd._text.log_lines import Once
from raysgd._text.secrets import masked
from raysgd.exceptions import OnFailure

logger = logging.getLogger(__name__)


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
    def open(self, run: Any, first_step: int | None = None) -> None:
        """Begin with a run.

        Args:
            run: The run, with its `folder`, `config` and `name`. A sink that writes elsewhere does not ask for the
                folder, because asking may make it.
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
        last_step: Of rows that have a step: up to which one they stay, too, where a run goes on inside an epoch.
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
        """Make the file, or leave in it what stays."""


def place_in(run: Any, name: Path) -> Path:
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
        self._owner, self._warned = owner, Once()
        self._run: Any = None
        self.first_step: int | None = None
        self._is_open = False

    def warns(self) -> AbstractContextManager[None]:
        """Warn instead of raising what the block raises, as where a row cannot be written."""
        return failures_warned(self._owner, self._warned)

    def open(self, run: Any, first_step: int | None = None) -> None:
        """Open the sink.

        Raises:
            Exception: It cannot be opened. Each row tries again.
        """
        self.begin(run, first_step)
        self._open_once()

    def begin(self, run: Any, first_step: int | None = None) -> None:
        """Leave it to the first row to open the sink."""
        self._run, self.first_step, self._is_open = run, first_step, False

    def write(self, row: Any, step: int) -> None:
        """Write one row, or warn."""
        with self.warns():
            self._open_once()
            shown = {name: row[name] for name in row if name not in self._hidden} if self._hidden else row
            self._sink.write(shown, step)

    def close(self, *, has_failed: bool = False) -> None:
        """Close what was opened, or warn."""
        with self.warns():
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
            self._sink.open(self._run, self.first_step)
        self._is_open = True


@contextmanager
def failures_warned(owner: str, warned: Once) -> Iterator[None]:
    """Warn instead of raising what the block raises, once for each kind of error; leave out the rest of the block.

    Args:
        owner: What fails, as the user calls it.
        warned: The kinds of errors that it was warned of.
    """
    try:
        yield
    except Exception as error:  # of a disk, of a service, or a mistake: days of training do not end for it
        kind = type(error).__name__
        if warned.is_first(kind):
            logger.warning(
                "%s: could not write (%s: %s); the run continues, and it tries again with the next result",
                owner,
                kind,
                masked(str(error)),
            )
