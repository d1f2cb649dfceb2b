"""Converts what a program and a detached trainer's process send each other: arguments, results, errors and output.

An object in Ray's object store is lost when the process that put it there ends. Arguments and results are therefore
sent as pickled bytes, of which the receiver has its own copy. The trainer's process can store a result until any
program requests it, even if the program that made the call has ended.

A program uses a detached trainer through a handle, a `DetachedTrainer`. The handle forwards every public method and
attribute to the trainer's process, so a new method or option needs no change in this module. The tables below list the
names that the handle does not forward, or forwards in another way.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd.core import arguments as checks
from raysgd.core.engine.worker import node_here
from raysgd.core.sending import cannot_import, is_sendable, packed_bytes
from raysgd.core.tables import read_table
from raysgd.core.text import log_lines
from raysgd.core.text.faults import describe_fault, has_user_code
from raysgd.core.text.log_lines import WorkerLogLine
from raysgd.core.text.secrets import masked
from raysgd.core.text.tracebacks import shows_all_frames
from raysgd.exceptions import UnpicklableError, WorkerFault

BESIDE = ("ledger", "status")
"""Names of methods that run at once, even while another call to the trainer is running. Other methods are queued."""

MAY_GO_ON = ("train", "validate")
"""Names of methods that run in the background if called with `blocking=False`, and return a handle to the call."""

STAYS_THERE = read_table(__file__)["stays there"]
"""Names of a trainer's methods and attributes that a handle rejects, each with the reason and an alternative."""


_NO_RANK = -1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST_PIECES = 20_000  # pieces of printed output to store; if there are more, the oldest are dropped


@dataclass(frozen=True)
class Detached:
    """Settings for a detached trainer, which outlives the program that creates it.

    Args:
        name: The trainer's name, which programs pass to `raysgd.attach`: up to 100 letters, digits, `.`, `_` and `-`.
            The first character must be a letter or a digit.
        keep_alive_s: After this many seconds without an attached program and without a running call, the trainer ends.
            If `folder` is set, the trainer is saved first. With None, the trainer never ends for this reason.
        folder: Folder in which the trainer is saved as `<name>.pt` before it ends because of `keep_alive_s` or `raysgd
            stop`: a path on the trainer's node, or a URI. `fit(..., resume_from="auto")` of the next trainer with this
            name and folder finds the file. Trainers of `raysgd.train` are not saved.
        replace: True to end any existing trainer with this name first, without saving it.
        resources: Custom Ray resources that the trainer's node must have, such as `{"stays": 0.01}`. By default the
            trainer runs on the node of the program that creates it, if possible. The trainer's process reserves no CPU.

    Raises:
        ValueError, TypeError: A value is not allowed.
    """

    name: str
    keep_alive_s: float | None = 3600.0
    folder: str | Path | None = None
    replace: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"`detached={masked(self.name)!r}`: need a name of letters, digits, `.`, `_` and `-` that "
                'begins with a letter or a digit, such as "run-7".'
            )
        checks.refuse_text(replace=self.replace)
        if self.keep_alive_s is not None:
            checks.check_seconds("keep_alive_s", self.keep_alive_s, may_be_least=False)


@dataclass(frozen=True)
class RemoteIterator:
    """Stands for an iterator that a trainer's method returned. The iterator itself stays in the trainer's process.

    The program requests each value of the iterator with a separate call.

    Attributes:
        token: ID of the call that returned the iterator.
    """

    token: str


class DetachedTraceback(Exception):
    """Shows where an exception was raised in the trainer's process.

    When the program raises the exception again, an object of this class becomes the exception's `__cause__`. If the
    exception already has a cause, the object becomes the `__cause__` of that cause.
    """

    def __str__(self) -> str:
        return f"in the process of the detached trainer: {self.args[0]}"


def _place(fault: WorkerFault) -> str:
    """Return the lines of user code that raised an exception, or with RAYSGD_TRACEBACK=full, the whole traceback."""
    if shows_all_frames():
        return fault.traceback_text
    return "\n  called from ".join([f"raised at {fault.location}", *fault.callers])


def _error_of(fault: WorkerFault) -> BaseException:
    return fault.error if fault.error is not None else RuntimeError(f"{fault.type_name}: {fault.message}")


def packed_arguments(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle the arguments of a call, to send them to the trainer's process.

    Args:
        function: Name of the called method or class, for the error message.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        UnpicklableError: An argument cannot be pickled. The message names the argument. Nothing was sent.
    """
    try:
        return packed_bytes("it", (tuple(args), dict(kwargs)))
    except UnpicklableError as error:
        name = next((name for name, value in _named(args, kwargs) if not is_sendable(value)), "an argument")
        words = str(error).replace("it cannot be sent to the workers", f"{name} cannot be sent to the trainer", 1)
        raise UnpicklableError(f"`{function}`: {words}") from error.__cause__


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"argument {index}", value) for index, value in enumerate(args, start=1))
    for name, value in kwargs.items():
        several = name == "callbacks" and isinstance(value, list | tuple)
        yield from ((f"`{name}[{i}]`", each) for i, each in enumerate(value)) if several else [(f"`{name}`", value)]


def unpacked_arguments(packed: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Unpickle the arguments of a call in the trainer's process.

    Raises:
        ModuleNotFoundError: The trainer's process cannot import a module that the arguments need.
    """
    try:
        args, kwargs = pickle.loads(packed)
    except ModuleNotFoundError as error:
        raise cannot_import(error.name) from error
    return args, kwargs


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call in the trainer's process: the result, or a description of the exception that was raised.

    Attributes:
        value: The result of the call. None if the call raised an exception.
        fault: Description of the exception. None if the call succeeded.
        cause: Description of the exception's `__cause__`. None if there is none.
        shows_user_code: True if the exception's traceback contains user code.
    """

    value: Any = None
    fault: WorkerFault | None = None
    cause: WorkerFault | None = None
    shows_user_code: bool = False

    def result(self) -> Any:
        """Return the result of the call, or raise the exception that the call raised."""
        if self.fault is None:
            return self.value
        error = _error_of(self.fault)
        if error.__cause__ is None and self.cause is not None:
            error.__cause__ = _error_of(self.cause)
            error.__cause__.__cause__ = DetachedTraceback(_place(self.cause))
        elif error.__cause__ is None and self.shows_user_code:
            error.__cause__ = DetachedTraceback(_place(self.fault))
        raise error


def packed_answer(body: Callable[[], Any]) -> bytes:
    """Call the function `body` in the trainer's process. Return its result or exception as a pickled `CallOutcome`."""
    try:
        return packed_bytes("the result", CallOutcome(body()))
    except BaseException as error:  # includes the `KeyboardInterrupt` of a Ctrl-C in the program
        fault, cause = (
            None if each is None else describe_fault(each, _NO_RANK, node_here()[1], portable=True)
            for each in (error, error.__cause__)
        )
        return packed_bytes("the error", CallOutcome(None, fault, cause, has_user_code(error)))


def unpacked_answer(packed: bytes) -> CallOutcome:
    """Unpickle the outcome of a call, in the program that made the call."""
    answer: CallOutcome = pickle.loads(packed)
    return answer


Piece = tuple[str, str] | WorkerLogLine
"""A piece of output of a trainer's process: a log line, or a pair of "stdout" or "stderr" and the printed string."""


class Output:
    """Collects what a detached trainer's process prints and logs, for programs that wait for a call. Thread-safe.

    The pieces of output are numbered, so that a program can say which pieces it has printed already.

    Args:
        first: Number of the first piece of output. If the process replaces one that died, the number must be larger
            than all numbers that the previous process used.
    """

    def __init__(self, first: int = 0) -> None:
        self._pieces: deque[Piece] = deque(maxlen=_MOST_PIECES)
        self._num_pieces = self._num_shown = first
        self._lock = threading.Lock()

    def install(self, level: int) -> None:
        """Start to collect what this process prints, and raysgd's log messages of at least this level."""
        log_lines.collect(level)
        logging.getLogger("ray._private.worker").addFilter(_is_of_user)
        sys.stdout, sys.stderr = _Stream(self, "stdout"), _Stream(self, "stderr")

    def add_piece(self, piece: Piece) -> None:
        """Store a piece of output, which gets the next number."""
        with self._lock:
            self._pieces.append(piece)
            self._num_pieces += 1

    def num_pieces(self) -> int:
        """Store the new log lines as pieces of output, and return the number for the next piece."""
        for line in log_lines.drain():
            self.add_piece(line)
        return self._num_pieces

    def since(self, seen: int | None) -> tuple[int, list[Piece]]:
        """Return the number for the next piece of output, and the pieces that a program has not printed yet.

        Args:
            seen: The number that the previous call for this program returned. None if the program has just attached and
                needs only those pieces that no program has printed.
        """
        num_pieces = self.num_pieces()
        with self._lock:
            seen = self._num_shown if seen is None else seen
            self._num_shown = max(self._num_shown, seen)
            return num_pieces, list(self._pieces)[max(0, len(self._pieces) - max(0, num_pieces - seen)) :]


def _is_of_user(record: logging.LogRecord) -> bool:
    """Return False for Ray's warning about blocking calls in async actors, and True for all other log records.

    The warning does not apply to the trainer's process, where calls to the trainer run in a separate thread.
    """
    return "inside async actor" not in str(record.msg)


class _Stream(io.TextIOBase):
    """Replaces stdout or stderr of a trainer's process, and passes each text that the process prints to an `Output`."""

    def __init__(self, output: Output, name: str) -> None:
        self._output, self._name = output, name

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class allows None
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._output.add_piece((self._name, text))
        return len(text)


def show(pieces: list[Piece]) -> None:
    """In the program, print and log the pieces of output that a detached trainer's process has collected."""
    for piece in pieces:
        if isinstance(piece, WorkerLogLine):
            logging.getLogger(piece.name).log(piece.level, "%s", piece.text)
        else:
            name, text = piece
            stream = sys.stderr if name == "stderr" else sys.stdout
            stream.write(text)
            stream.flush()
