"""Messages between a program and a detached trainer's process: arguments, results, errors and output.

Objects in Ray's object store are lost with the process that put them there. Bytes in a message are copied, so they
outlive the program that sent them, and an answer can wait in the trainer's process for any program.

The handle in the program looks up public names of a trainer in the trainer's process, so a new method or option needs
no change here. The tables below list the names that the handle treats differently from ordinary queued calls and
attributes.
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
from raysgd.core.engine.shared.faults import describe_fault, has_user_code
from raysgd.core.engine.worker import cannot_import, is_sendable, node_here, packed_bytes
from raysgd.core.text import log_lines
from raysgd.core.text.frames import shows_all_frames
from raysgd.core.text.log_lines import WorkerLogLine
from raysgd.exceptions import UnpicklableError, WorkerFault

BESIDE = ("ledger", "status")
"""Names of methods that may run in parallel to a running call."""

MAY_GO_ON = ("train", "validate")
"""Names of methods that return a handle to a background call if called with `blocking=False`."""

_IN_PROCESS = "it stays in the trainer's process, and cannot be sent."
STAYS_THERE: dict[str, str] = {
    "worker_group": f"{_IN_PROCESS} Use `apply_all_workers(fn)`.",
    "take_state_of": "two trainers would have to be in one process. Use `save` and `load`.",
    "as_trainable": "Ray Tune makes the trainers. Call it on the class.",
    "can_restore": "call it on the class.",
    "checkpoint_manager": f"{_IN_PROCESS} Use `best_checkpoint` and `latest_checkpoint`.",
    "is_started": "`raysgd.detached_trainers()` lists the detached trainers.",
    "preprocess_datasets": "`fit` calls it.",
    "run_iterator": f"{_IN_PROCESS} Use `run`, which continues without your program.",
    "setup": "`fit` calls it.",
    "to_tune_trainable": "Ray Tune makes the trainers. Call it on a trainer that is not detached.",
    "to_worker_group": f"{_IN_PROCESS} Make the trainer without `detached`.",
    "training_loop": "`fit` calls it.",
}
"""Names that a handle rejects, with the reason and an alternative."""


_NO_RANK = -1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST_PIECES = 20_000  # above this limit, the oldest pieces are dropped


@dataclass(frozen=True)
class Detached:
    """Settings for a trainer that outlives its program.

    Args:
        name: The name that `raysgd.attach` takes. Letters, digits, `.`, `_` and `-`, as in a file name.
        keep_alive_s: How long the trainer waits while no program is attached and no call is running. Then the trainer
            is saved to `folder`, if set, and ends. None to wait forever.
        folder: Folder in which `<name>.pt` is saved when the trainer times out or is ended by `raysgd stop`: a path on
            the trainer's node, or a URI. `fit(..., resume_from="auto")` of the next trainer with this name and folder
            finds the file.
        replace: True to first end any trainer that has this name, without saving it.
        resources: Custom Ray resources that the trainer's node must have, such as `{"stays": 0.01}`. By default the
            trainer runs on the program's node, if possible. The trainer's process reserves no CPU.

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
                f"`detached={self.name!r}`: need a name of letters, digits, `.`, `_` and `-` that begins with a letter "
                'or a digit, such as "run-7".'
            )
        checks.refuse_text(replace=self.replace)
        if self.keep_alive_s is not None:
            checks.check_seconds("keep_alive_s", self.keep_alive_s, may_be_least=False)

    @classmethod
    def of(cls, detached: str | Detached) -> Detached:
        """Return the settings for the user's `detached` argument, which is a name or a `Detached`."""
        return detached if isinstance(detached, Detached) else cls(detached)


@dataclass(frozen=True)
class RemoteIterator:
    """Represents an iterator that stays in the trainer's process. The program gets each value with a separate call.

    Attributes:
        token: ID of the call that returned the iterator.
    """

    token: str


class DetachedTraceback(Exception):
    """Shows where an exception was raised in the trainer's process. Set as the exception's cause in the program."""

    def __str__(self) -> str:
        return f"in the process of the detached trainer: {self.args[0]}"


def _place(fault: WorkerFault) -> str:
    """Return where an exception was raised: the user's lines, or the whole traceback with RAYSGD_TRACEBACK=full."""
    if shows_all_frames():
        return fault.traceback_text
    return "\n  called from ".join([f"raised at {fault.location}", *fault.callers])


def _error_of(fault: WorkerFault) -> BaseException:
    return fault.error if fault.error is not None else RuntimeError(f"{fault.type_name}: {fault.message}")


def packed_arguments(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle the arguments of a call for the trainer's process.

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
    """The outcome of a call: its result, or a description of the exception that it raised.

    Attributes:
        value: The result. None if the call raised an exception.
        fault: The exception. None if the call succeeded.
        cause: The exception's cause. None if it has none.
        shows_user_code: True if the exception passed through user code.
    """

    value: Any = None
    fault: WorkerFault | None = None
    cause: WorkerFault | None = None
    shows_user_code: bool = False

    def result(self) -> Any:
        """Return the result, or raise the exception."""
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
    """Run `body` and return its result or exception as a pickled `CallOutcome`."""
    try:
        return packed_bytes("the result", CallOutcome(body()))
    except BaseException as error:  # includes a Ctrl-C that the program forwarded
        fault, cause = (
            None if each is None else describe_fault(each, _NO_RANK, node_here()[1], portable=True)
            for each in (error, error.__cause__)
        )
        return packed_bytes("the error", CallOutcome(None, fault, cause, has_user_code(error)))


def unpacked_answer(packed: bytes) -> CallOutcome:
    """Unpickle a call's answer in the program."""
    answer: CallOutcome = pickle.loads(packed)
    return answer


Piece = tuple[str, str] | WorkerLogLine
"""A piece of output: a pair of "stdout" or "stderr" and the printed string, or a log line."""


class Output:
    """Collects the printed output and log lines of a detached trainer's process after `install`. Thread-safe.

    Args:
        first: Number of the first piece of output. Must be larger than all numbers that the previous process used.
    """

    def __init__(self, first: int = 0) -> None:
        self._pieces: deque[Piece] = deque(maxlen=_MOST_PIECES)
        self._num_pieces = self._num_shown = first
        self._lock = threading.Lock()

    def install(self, level: int) -> None:
        """Start collecting all printed output and raysgd's log lines of at least this level."""
        log_lines.collect(level)
        logging.getLogger("ray._private.worker").addFilter(_is_of_user)
        sys.stdout, sys.stderr = _Stream(self, "stdout"), _Stream(self, "stderr")

    def add_piece(self, piece: Piece) -> None:
        """Store a piece of output."""
        with self._lock:
            self._pieces.append(piece)
            self._num_pieces += 1

    def num_pieces(self) -> int:
        """Collect new log lines and return the number of pieces of output so far."""
        for line in log_lines.drain():
            self.add_piece(line)
        return self._num_pieces

    def since(self, seen: int | None) -> tuple[int, list[Piece]]:
        """Return the number of pieces of output so far, and the new pieces.

        Args:
            seen: Number of pieces that the program has printed, so that it needs only later ones. None to return the
                pieces that no program has printed.
        """
        num_pieces = self.num_pieces()
        with self._lock:
            seen = self._num_shown if seen is None else seen
            self._num_shown = max(self._num_shown, seen)
            return num_pieces, list(self._pieces)[max(0, len(self._pieces) - max(0, num_pieces - seen)) :]


def _is_of_user(record: logging.LogRecord) -> bool:
    """Filter out Ray's warning about blocking calls in async actors.

    It does not apply here, because the trainer's calls run in a separate thread.
    """
    return "inside async actor" not in str(record.msg)


class _Stream(io.TextIOBase):
    """Replaces stdout or stderr of a detached trainer's process. Adds what is printed to `Output`."""

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
    """Print and log a detached trainer's output in the program."""
    for piece in pieces:
        if isinstance(piece, WorkerLogLine):
            logging.getLogger(piece.name).log(piece.level, "%s", piece.text)
        else:
            name, text = piece
            stream = sys.stderr if name == "stderr" else sys.stdout
            stream.write(text)
            stream.flush()
