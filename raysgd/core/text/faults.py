"""Turns an exception of user code into a `WorkerFault`, a description that can be pickled and sent to the driver.

The process that raised the exception uses this module.
"""

from __future__ import annotations

import bdb
import pickle
import re
import traceback
from types import TracebackType
from typing import Any

from raysgd.core.text.secrets import masked
from raysgd.core.text.tracebacks import is_of_library, is_of_user, short_name
from raysgd.exceptions import WorkerFault, portable_copy

_QUOTED_FRAME = re.compile(r'( *)File "([^"\n]+)", line (\d+), in (\S+)')
_HEADS = ("Original Traceback (most recent call last):", "in user code:")
"""Lines that precede quoted stack frames in error messages of PyTorch's loader processes and TensorFlow's functions."""
_MOST_CALLERS = 5
_MOST_CAUSES = 3
_LONGEST_CAUSE = 200  # largest number of characters of a cause in a message
_NO_DEBUGGER = (
    "a worker has no terminal, so a debugger cannot stop there. To debug an operator make the trainer with "
    "`use_local=True`: it then runs in your program. A training function can be called by itself. With the environment "
    "variable RAY_DEBUG=1, `breakpoint()` waits for Ray's debugger."
)
_NO_INPUT = "EOF when reading a line"  # message of the error that Python's `input` raises without a terminal
_LONGEST_TEXT = 20_000  # largest number of characters in a message or a traceback
_OF_PLAIN_ERRORS = ("builtins", "raysgd", "torch")
_LARGEST_ERROR = 2**20  # largest size of a pickled exception in bytes; the driver may receive one from every rank


def describe_fault(error: BaseException, rank: int, node: str, *, portable: bool, brief: bool = False) -> WorkerFault:
    """Describe an exception that user code raised in this process.

    The traceback in the description starts at the first frame of user code, because raysgd's frames before it do not
    help users.

    Args:
        error: The exception to describe. Its traceback is shortened in place.
        rank: Rank of this worker.
        node: Address of this node.
        portable: True if the description is sent to another process. Otherwise, the exception keeps its live frames for
            debuggers. `traceback_text`, `callers` and `causes` then stay empty, because Python shows the frames anyway.
        brief: True to omit callers, causes, and the source lines in `traceback_text`. Python would have to read many
            files to get these source lines.
    """
    error.__traceback__ = _from_user_code(error.__traceback__)
    message, frames = _message(error, portable), _frames(error)
    return WorkerFault(
        rank=rank,
        node=node,
        error=_picklable(error) if portable else error,
        type_name=type(error).__name__,
        message=message,
        location=_location(error, frames),
        traceback_text=masked(_traceback_text(error, message, frames if brief else None)) if portable else "",
        callers=_callers(error) if portable and not brief else (),
        causes=_causes(error) if portable and not brief else (),
    )


def has_user_code(error: BaseException) -> bool:
    """Return True if the exception's traceback contains user code."""
    return bool(_frames(error, only_own=True))


def shortened(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return the text, cut to `longest` characters. If it was cut, its full length is appended."""
    return text if len(text) <= longest else f"{text[:longest]} ... (cut; {len(text):,} characters in all)"


def _from_user_code(where: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that starts at the first frame of user code.

    Return all of it if it has no user code.
    """
    link = where
    while link is not None:
        if is_of_user(link.tb_frame):
            return link
        link = link.tb_next
    return where


def _traceback_text(error: BaseException, message: str, frames: traceback.StackSummary | None) -> str:
    """Return the exception's traceback as a string.

    Args:
        error: The exception.
        message: The exception's message.
        frames: If given, list only these frames, without source lines.
    """
    if frames is not None:
        places = [f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n' for frame in frames]
        return f"Traceback (most recent call last):\n{''.join(places)}{type(error).__name__}: {message}\n"
    if len(message) > _LONGEST_TEXT:  # do not use `format_exception`, which would include the whole message again
        return "".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__name__}: {message[:200]} ...\n"
    return shortened("".join(traceback.format_exception(type(error), error, error.__traceback__)), 4 * _LONGEST_TEXT)


def _message(error: BaseException, portable: bool) -> str:
    if portable and isinstance(error, bdb.BdbQuit):
        return _NO_DEBUGGER
    if portable and isinstance(error, EOFError) and str(error) == _NO_INPUT:
        return f"{error}: a worker has no terminal. Read what you need in your program, and pass it in `config`."
    _, text = _quoted(error)
    return masked(shortened(text))


def _quoted(error: BaseException) -> tuple[list[str], str]:
    """Split an exception's message into quoted stack frames and the remaining text.

    Errors of PyTorch's loader processes and of TensorFlow's functions quote stack frames in their messages.

    Returns:
        The quoted lines of user code, innermost last, and the message without the quoted frames.
    """
    text = str(error)
    if not any(head in text for head in _HEADS):
        return [], text
    places, words = list[str](), list[str]()
    indent, is_place = "", False
    for line in text.splitlines():
        if frame := _QUOTED_FRAME.match(line):
            indent, is_place = f"{frame[1]}  ", not is_of_library(frame[2])
            if is_place:
                places.append(f"{frame[2]}:{frame[3]} in {frame[4]}")
        elif indent and line.startswith(indent):
            if is_place:
                places[-1] += f": {line.strip()}"
            is_place = False  # ignore further indented lines, which only underline parts of the line of code
        else:
            indent = ""
            words.append(line.strip())
    said = "\n".join(line for line in words if line and line not in _HEADS)
    return places, said.removeprefix(f"{type(error).__name__}: ")


def _location(error: BaseException, frames: traceback.StackSummary) -> str:
    """Return the innermost line of user code in the traceback or quoted in the message.

    If there is none, return the place of the last frame.
    """
    if not frames:
        return "an unknown place"
    own = _own_lines(error)
    if own:
        return own[-1]
    place = f"{short_name(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"
    return f"{place} (in no method of yours)"


def _callers(error: BaseException) -> tuple[str, ...]:
    """Return the lines of user code that called the innermost line of user code, innermost first.

    If there are many, return the innermost lines, a count of the omitted lines, and the outermost line.
    """
    outer = _own_lines(error)[-2::-1]
    if len(outer) <= _MOST_CALLERS:
        return tuple(outer)
    num_more = len(outer) - _MOST_CALLERS + 1
    return (*outer[: _MOST_CALLERS - 2], f"{num_more} other lines of your code", outer[-1])


def _causes(error: BaseException) -> tuple[str, ...]:
    """Describe the exceptions that caused this exception, latest first, each with its innermost line of user code."""
    causes: list[str] = []
    while len(causes) < _MOST_CAUSES:
        word, before = "caused by", error.__cause__
        if before is None and not error.__suppress_context__:
            word, before = "raised while handling", error.__context__
        if before is None:
            break
        first, *_ = masked(str(before)).splitlines() or [""]
        text = f"{type(before).__name__}: {shortened(first, _LONGEST_CAUSE)}".removesuffix(": ")
        causes.append(", raised at ".join([f"{word} {text}", *_own_lines(before)[-1:]]))
        error = before
    return tuple(causes)


def _own_lines(error: BaseException) -> list[str]:
    """Return the lines of user code in an exception's traceback, then lines quoted in its message, innermost last."""
    own = _frames(error, only_own=True)
    places = [(f"{frame.filename}:{frame.lineno} in {frame.name}", frame.line) for frame in own]
    return [masked(f"{place}: {line}" if line else place) for place, line in places] + [*map(masked, _quoted(error)[0])]


def _frames(error: BaseException, *, only_own: bool = False) -> traceback.StackSummary:
    """Return the frames of the exception's traceback. Source files are read only when a line's text is used.

    Args:
        error: The exception.
        only_own: True to return only the frames of user code.
    """
    frames = traceback.walk_tb(error.__traceback__)
    chosen = ((frame, line) for frame, line in frames if is_of_user(frame) or not only_own)
    return traceback.StackSummary.extract(chosen, lookup_lines=False)


def _picklable(error: BaseException) -> BaseException | None:
    """Return the exception if it can be pickled and is not too large.

    Otherwise, return a copy in which strings replace the values that cannot be pickled or are too large. Return None if
    no such copy can be made.
    """
    if _is_plain(error) or _survives(error):
        return error
    try:
        rest = portable_copy(error, _portable)
    except Exception:  # the attributes of a user's exception may raise anything
        return None
    return rest if _survives(rest) else None


def _is_plain(error: BaseException) -> bool:
    """Return True if the exception is certain to be picklable.

    Most connection errors pass this check. They do not need the slower check, which pickles the exception.
    """
    is_known = type(error).__module__.partition(".")[0] in _OF_PLAIN_ERRORS
    return is_known and not error.__dict__ and all(type(arg) is str and len(arg) <= _LONGEST_TEXT for arg in error.args)


def _survives(error: BaseException) -> bool:
    packed = _packed(WorkerFault(-1, "", error, "", "", "", ""))
    return packed is not None and type(pickle.loads(packed).error).__name__ == type(error).__name__


def _packed(value: Any) -> bytes | None:
    """Return the value in pickled form. Return None if it is too large or cannot be pickled and unpickled."""
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(value)
        if len(packed) <= _LARGEST_ERROR:
            pickle.loads(packed)
            return packed
    except Exception:  # pickling an object of the user may raise anything
        return None
    return None


def _portable(value: Any) -> Any:
    if _packed(value) is not None:
        return value
    return shortened(value if isinstance(value, str) else repr(value))
