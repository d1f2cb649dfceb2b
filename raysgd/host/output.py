"""The output of a host: what its trainer prints and logs, kept for the program that is attached."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections import deque
from dataclasses import dataclass

from raysgd._text import log_lines
from raysgd._text.log_lines import WorkerLogLine

_MOST_PIECES = 20_000  # then the oldest go


@dataclass(frozen=True)
class PrintedText:
    """A piece of text that was printed.

    Attributes:
        stream: "stdout" or "stderr".
        text: With its line breaks.
    """

    stream: str
    text: str


Piece = PrintedText | WorkerLogLine


class Output:
    """Keeps what this process prints and logs, from `install` on. For any thread.

    Args:
        first: The number of the first piece: larger than those of the process before this one.
    """

    def __init__(self, first: int = 0) -> None:
        self._pieces: deque[Piece] = deque(maxlen=_MOST_PIECES)
        self._num_pieces = self._num_shown = first
        self._lock = threading.Lock()

    def install(self, level: int) -> None:
        """Keep everything from now on, and log lines of raysgd from this level on."""
        log_lines.collect(level)
        logging.getLogger("ray._private.worker").addFilter(_is_of_user)
        sys.stdout, sys.stderr = _Stream(self, "stdout"), _Stream(self, "stderr")

    def add(self, piece: Piece) -> None:
        """Keep a piece."""
        with self._lock:
            self._pieces.append(piece)
            self._num_pieces += 1

    def num_pieces(self) -> int:
        """Return how many pieces there were so far."""
        for line in log_lines.drain():
            self.add(line)
        return self._num_pieces

    def since(self, seen: int | None) -> tuple[int, list[Piece]]:
        """Return how many pieces there were, and those after the first `seen`; None: after those that anyone has seen.

        A program that asks has shown what is before.
        """
        num_pieces = self.num_pieces()
        with self._lock:
            seen = self._num_shown if seen is None else seen
            self._num_shown = max(self._num_shown, seen)
            return num_pieces, list(self._pieces)[max(0, len(self._pieces) - max(0, num_pieces - seen)) :]


def _is_of_user(record: logging.LogRecord) -> bool:
    """Return whether a line of Ray's is more than its advice to authors of actors; calls have their own thread here."""
    return "inside async actor" not in str(record.msg)


class _Stream(io.TextIOBase):
    """A standard stream of a host."""

    def __init__(self, output: Output, name: str) -> None:
        self._output, self._name = output, name

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class says that there may be none
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._output.add(PrintedText(self._name, text))
        return len(text)


def show(pieces: list[Piece]) -> None:
    """Print and log, in the program, what came from a host."""
    for piece in pieces:
        if isinstance(piece, PrintedText):
            stream = sys.stderr if piece.stream == "stderr" else sys.stdout
            stream.write(piece.text)
            stream.flush()
        else:
            logging.getLogger(piece.name).log(piece.level, "%s", piece.text)
