"""Puts an exception of user code into words where it was raised, in a form that can leave the process."""

from __future__ import annotations

import os
import pickle
import re
import sysconfig
import traceback
from types import FrameType, TracebackType
from typing import Any

from raysgd._text.secrets import masked
from raysgd.exceptions import WorkerFault, portable_copy

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARY_FOLDERS = (_PACKAGE, sysconfig.get_path("stdlib") + os.sep)
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_QUOTED_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)\n +(\S.*)')
_LONGEST_TEXT = 20_000  # characters of a message or a traceback
_OF_PLAIN_ERRORS = ("builtins", "raysgd", "torch")
_LARGEST_ERROR = 2**20  # bytes of a pickled exception; a driver gets one from each rank


def describe_fault(
    error: BaseException, rank: int, node: str, *, portable: bool, brief: bool = False, operator: Any = None
) -> WorkerFault:
    """Describe `error`, which user code raised.

    The traceback begins at the first line of user code: what the library called to get there does not help.

    Args:
        error: The exception.
        rank: Rank of this worker.
        node: Address of this node.
        portable: Whether it has to leave the process. Else the exception stays whole, with its live frames, which a
            debugger can use; Python then shows these frames by itself, so they are not told in words too.
        brief: Whether the traceback goes without the text of its lines, for which Python reads many files.
        operator: The user's object that was at work, if there is one.
    """
    error.__traceback__ = _from_user_code(error.__traceback__)
    message, frames = masked(shortened(str(error))), _frames(error)
    return WorkerFault(
        rank=rank,
        node=node,
        error=_picklable(error) if portable else error,
        type_name=type(error).__name__,
        message=message,
        location=_user_location(error, frames, type(operator)),
        traceback_text=masked(_traceback_text(error, message, frames if brief else None)) if portable else "",
    )


def has_user_code(error: BaseException) -> bool:
    """Return whether code of a user is in the traceback of an exception."""
    return bool(_frames(error, only_own=True))


def shortened(text: str, longest: int = _LONGEST_TEXT) -> str:
    """`text`, or its beginning and how long it was."""
    return text if len(text) <= longest else f"{text[:longest]} ... (cut; {len(text):,} characters in all)"


def _from_user_code(where: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither ours nor a library's; all of it when there is none."""
    link = where
    while link is not None:
        if _is_own(link.tb_frame):
            return link
        link = link.tb_next
    return where


def _traceback_text(error: BaseException, message: str, frames: traceback.StackSummary | None) -> str:
    """The traceback in words; only of these frames, without the text of their lines, where they are given."""
    if frames is not None:
        places = [f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n' for frame in frames]
        return f"Traceback (most recent call last):\n{''.join(places)}{type(error).__name__}: {message}\n"
    if len(message) > _LONGEST_TEXT:  # it was cut; Python would put all of it into words again
        return "".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__name__}: {message[:200]} ...\n"
    return shortened("".join(traceback.format_exception(type(error), error, error.__traceback__)), 4 * _LONGEST_TEXT)


def _user_location(error: BaseException, frames: traceback.StackSummary, operator_cls: type[Any]) -> str:
    """The innermost line that is neither ours nor a library's.

    Where there is none, it is one that the message quotes, as it does if a process of a loader has failed; else the
    `setup` of the operator with the innermost line of all.
    """
    if not frames:
        return "an unknown place"
    own = _frames(error, only_own=True)
    frame = (own or frames)[-1]
    line = f": {frame.line}" if frame.line else ""
    place = f"{frame.filename}:{frame.lineno} in {frame.name}{line}"
    if own:
        return place
    quoted = [found for found in _QUOTED_FRAME.findall(str(error)) if not _is_library(found[0])]
    if quoted:
        return "{}:{} in {}: {}".format(*quoted[-1])
    code = getattr(getattr(operator_cls, "setup", None), "__code__", None)
    if code is None or _is_library(code.co_filename):
        return place
    setup = f"{code.co_filename}:{code.co_firstlineno} in {operator_cls.__name__}.setup"
    return f"{setup} (no line of your code was running, but {place})"


def _frames(error: BaseException, *, only_own: bool = False) -> traceback.StackSummary:
    """The frames of its traceback, or those of the user. A file is read only when the text of its line is used."""
    frames = traceback.walk_tb(error.__traceback__)
    chosen = ((frame, line) for frame, line in frames if _is_own(frame) or not only_own)
    return traceback.StackSummary.extract(chosen, lookup_lines=False)


def _is_own(frame: FrameType) -> bool:
    """Return whether the user wrote this code, in a file or at a prompt. What Python makes for a dataclass is not."""
    name, module = frame.f_code.co_filename, frame.f_globals
    if name.startswith("<"):
        return module.get("__name__") == "__main__" and "__file__" not in module
    return not _is_library(name)


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARY_FOLDERS) or any(part in filename for part in _LIBRARY_PARTS)


def _picklable(error: BaseException) -> BaseException | None:
    """The exception if it survives pickling inside a fault, else what is left of it without what does not, or None."""
    if _is_plain(error) or _survives(error):
        return error
    try:
        rest = portable_copy(error, _travels, _shown)
    except Exception:  # whatever the attributes of the user's exception raise
        return None
    return rest if _survives(rest) else None


def _is_plain(error: BaseException) -> bool:
    """Return whether it surely can be pickled, so that this need not be tried: what most connections end with."""
    is_known = type(error).__module__.partition(".")[0] in _OF_PLAIN_ERRORS
    return is_known and not error.__dict__ and all(type(arg) is str and len(arg) <= _LONGEST_TEXT for arg in error.args)


def _survives(error: BaseException) -> bool:
    packed = _packed(WorkerFault(-1, "", error, "", "", "", ""))
    return packed is not None and type(pickle.loads(packed).error).__name__ == type(error).__name__


def _travels(value: Any) -> bool:
    return _packed(value) is not None


def _packed(value: Any) -> bytes | None:
    """`value`, pickled; None where that fails, does not come back, or gives more than anybody can want to know."""
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(value)
        if len(packed) <= _LARGEST_ERROR:
            pickle.loads(packed)
            return packed
    except Exception:  # whatever pickling an object of the user raises
        return None
    return None


def _shown(value: Any) -> str:
    return shortened(value if isinstance(value, str) else repr(value))
