"""raysgd's logging: shows warnings by default, and shows the workers' log lines in the driver, with their ranks.

A library usually leaves logging to its user. raysgd warns about lost workers and about anything that changes training
results, so it shows warnings until the user configures logging. From then on, the user's handlers decide what
is shown. A warning that would repeat on every batch is shown once, and lists of ranks are kept short.

Text from files is escaped before a command or a log line shows it in a terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

LONGEST = 300


def printable(text: str, longest: int | None = LONGEST) -> str:
    r"""Escape and shorten text from a file, so that it cannot move the cursor of a terminal or change its colors.

    Args:
        text: The text.
        longest: Number of characters to keep, or None to keep all.

    >>> print(printable("loss\x1b[31m"))
    loss\x1b[31m
    """
    kept = text if longest is None else text[:longest]
    safe = kept if kept.isprintable() else "".join(map(_escaped, kept))
    return safe if len(kept) == len(text) else f"{safe}..."


def printable_lines(text: str) -> str:
    """Escape each line of a text whose line breaks are ours."""
    return "\n".join(printable(line, None) for line in text.split("\n"))


@contextlib.contextmanager
def errors_printable() -> Iterator[None]:
    """Escape the messages of exceptions in the `with` block, and of their causes, because they may quote a file."""
    try:
        yield
    except Exception as raised:
        error: BaseException | None = raised
        while error is not None:
            error.args = tuple(printable_lines(each) if isinstance(each, str) else each for each in error.args)
            error = error.__cause__ or error.__context__
        raise


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


LEVEL_VARIABLE = "RAYSGD_LOG_LEVEL"

_NAME = "raysgd"
_FORMAT = "%(asctime)s raysgd %(levelname)s: %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_MOST_NOTES = 1000  # largest number of lines that a worker stores for the driver; older lines are dropped
_MOST_TOLD = 10_000  # largest number of lines that a driver remembers, to log each line only once


@dataclass(frozen=True)
class WorkerLogLine:
    """A line of the log that a worker sends to the driver."""

    name: str
    level: int
    text: str


class DefaultHandler(logging.Handler):
    """Writes raysgd's log lines to stderr, unless the user has configured a handler for them.

    Control codes of terminals are escaped, because a line may quote a file from a stranger.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT, _TIME))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_handled_elsewhere(record.name):
            print(printable_lines(self.format(record)), file=sys.stderr)

    def _is_handled_elsewhere(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


class LogBuffer(logging.Handler):
    """Stores the log lines of a worker process until they are sent to the driver."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._notes: deque[WorkerLogLine] = deque(maxlen=_MOST_NOTES)
        self._glanced_at: deque[WorkerLogLine] = deque(maxlen=_MOST_NOTES)

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() == self._pid:
            self._notes.append(WorkerLogLine(record.name, record.levelno, self.format(record)))
        else:  # show the line here, because a data loader's process cannot send lines to the driver
            print(printable_lines(self.format(record)), file=sys.stderr)

    def glance(self) -> tuple[WorkerLogLine, ...]:
        """Return new lines, to be sent with a heartbeat.

        `drain` returns these lines again, because the driver may never read the heartbeat.
        """
        notes = _taken_from(self._notes)
        self._glanced_at.extend(notes)
        return notes

    def drain(self) -> tuple[WorkerLogLine, ...]:
        """Return the lines since the last `drain`.

        Lines that other threads add during this call are left for the next call.
        """
        return (*_taken_from(self._glanced_at), *_taken_from(self._notes))


class LogRelay:
    """Logs the workers' log lines in the driver. Each line is logged once, with the ranks that have sent it so far."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, notes: Mapping[str, Sequence[WorkerLogLine]]) -> None:
        """Log the workers' lines that have not been logged before.

        Args:
            notes: Lines by sender: a rank as a string, such as `"0"`, or a description of a worker without a rank.
        """
        speakers: dict[WorkerLogLine, list[str]] = {}
        for speaker, said in notes.items():
            for note in dict.fromkeys(said):
                speakers.setdefault(note, []).append(speaker)
        for note, who in speakers.items():
            if (note.name, note.text) not in self._told:
                if len(self._told) >= _MOST_TOLD:
                    self._told.clear()
                self._told.add((note.name, note.text))
                logging.getLogger(note.name).log(note.level, "%s: %s", _named(who), note.text)


def install() -> None:
    """Make raysgd show warnings by default, or the level set in `RAYSGD_LOG_LEVEL`.

    Every process that imports raysgd calls this function.
    """
    logger = logging.getLogger(_NAME)
    if not any(isinstance(handler, DefaultHandler | LogBuffer) for handler in logger.handlers):
        logger.addHandler(DefaultHandler())
    chosen = os.environ.get(LEVEL_VARIABLE)
    if not chosen:
        return
    if chosen.upper() in _LEVELS:
        logger.setLevel(_LEVELS[chosen.upper()])
    else:
        warnings.warn(f"`{LEVEL_VARIABLE}={chosen}` has no effect: use one of {', '.join(_LEVELS)}.", stacklevel=2)


def level() -> int:
    """Return the lowest level of raysgd's log lines that is logged in this process."""
    return logging.getLogger(_NAME).getEffectiveLevel()


def collect(from_level: int) -> None:
    """Store log lines for the driver instead of showing them.

    Worker processes and the processes of detached trainers call this function.

    Args:
        from_level: The lowest level of the lines to store.
    """
    global _notebook
    logger = logging.getLogger(_NAME)
    logger.handlers = [each for each in logger.handlers if not isinstance(each, DefaultHandler | LogBuffer)]
    _notebook = LogBuffer()
    logger.addHandler(_notebook)
    logger.setLevel(from_level)


def glance() -> tuple[WorkerLogLine, ...]:
    """Return new log lines of this process, to be sent with a heartbeat. The next `drain` returns them again.

    Return an empty tuple if this process has not called `collect`.
    """
    return () if _notebook is None else _notebook.glance()


def drain() -> tuple[WorkerLogLine, ...]:
    """Return the log lines of this process since the last `drain`.

    Return an empty tuple if this process has not called `collect`.
    """
    return () if _notebook is None else _notebook.drain()


_notebook: LogBuffer | None = None


def _taken_from(notes: deque[WorkerLogLine]) -> tuple[WorkerLogLine, ...]:
    return tuple(notes.popleft() for _ in range(len(notes)))


def _named(who: Sequence[str]) -> str:
    ranks = [int(each) for each in who if each.isdigit()]
    return named(ranks) if ranks else who[0]


class Once:
    """Distinguishes the first call with a key from later calls, for example to log a warning only once.

    Several threads may use the same object.

    >>> once = Once()
    >>> once.is_first("weights"), once.is_first("weights"), once.is_first("accuracy")
    (True, False, True)
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, object] = {}

    def is_first(self, key: Hashable) -> bool:
        """Return True if this is the first call with this key."""
        mark = object()
        return self._first.setdefault(key, mark) is mark  # `setdefault` is atomic, so only one thread gets True


def listed(ranks: Collection[int]) -> str:
    """Format ranks as an ascending list for use in a sentence.

    Four or more consecutive ranks become a range such as `0-3`.
    """
    distances = groupby(enumerate(sorted(ranks)), lambda each: each[1] - each[0])  # equal for consecutive ranks
    runs = [[rank for _, rank in run] for _, run in distances]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs)


def named(ranks: Collection[int]) -> str:
    """Format ranks like `listed`, preceded by the word "rank" or "ranks".

    >>> named([2]), named(range(4)), named([0, 2])
    ('rank 2', 'ranks 0-3', 'ranks 0, 2')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"
