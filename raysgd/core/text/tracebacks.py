"""Removes library frames from the tracebacks that users see. `RAYSGD_TRACEBACK=full` disables this.

Library frames are all frames that are not user code: those of raysgd, of installed packages and of the standard
library. Of the user code that raysgd called, at most three frames are kept: the first and the last two.

As in Keras and JAX, the traceback of the exception object itself is shortened, and no hook of Python or IPython is
replaced. Debuggers still stop in the user's frames, even in a worker that runs in this process. An error that may be a
bug in raysgd keeps its whole traceback.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sysconfig
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from raysgd.core.text.secrets import masked
from raysgd.exceptions import RaySGDError

TRACEBACK_VARIABLE = "RAYSGD_TRACEBACK"

_PLACE_WITHOUT_CODE = re.compile(r"([^\n]+):(\d+) in [\w<>.]+")
_PACKAGE = str(Path(__file__).absolute().parents[2]) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
# Occurs in the name of each file that TensorFlow generates from a user's function.
_MADE_BY_TENSORFLOW = f"{os.sep}__autograph_generated_file"
_FOLDERS_OF_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def shows_all_frames() -> bool:
    """Return True if `RAYSGD_TRACEBACK` is "full". Errors then show the frames of raysgd and other libraries, too."""
    return os.environ.get(TRACEBACK_VARIABLE, "").lower() == "full"


def is_of_user(frame: FrameType) -> bool:
    """Return True if the user wrote the frame's code, in a file or at a prompt.

    Code that Python generates does not count as the user's.
    """
    name, module = frame.f_code.co_filename, frame.f_globals
    if name.startswith("<"):
        return module.get("__name__") == "__main__" and module.get("__file__", name) == name
    return not is_of_library(name)


def is_of_library(filename: str) -> bool:
    """Return True if a file belongs to the standard library, an installed package, raysgd or TensorFlow's AutoGraph."""
    parts = (*_FOLDERS_OF_PACKAGES, _MADE_BY_TENSORFLOW)
    return filename.startswith((_PACKAGE, _STANDARD_LIBRARY)) or any(part in filename for part in parts)


def frames_of_user(trace: TracebackType | None, most: int) -> TracebackType | None:
    """Return a traceback with only the frames of the user's code. Return None if there are none.

    If there are more than `most` such frames, keep the first frame and the last `most - 1` frames.
    """
    links = []
    while trace is not None:
        if is_of_user(trace.tb_frame):
            links.append(trace)
        trace = trace.tb_next
    kept = None
    for link in reversed(links if len(links) <= most else [links[0], *links[1 - most :]]):
        kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def with_code(place: str) -> str:
    """Return a location, `file:line in function`, followed by its line of code if this process can read the file.

    Any other text is returned unchanged.

    The process that raised the error may lack the file. A worker on another node has neither the driver's script nor a
    notebook's cells.
    """
    parts = _PLACE_WITHOUT_CODE.fullmatch(place)
    code = linecache.getline(parts[1], int(parts[2])).strip() if parts else ""
    return masked(f"{place}: {code}") if code else place


def short_name(filename: str) -> str:
    """Shorten the path of a library's file: start the path at the package's folder. Other paths stay unchanged.

    >>> short_name("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py"), short_name("/home/me/train.py")
    ('torch/nn/modules/linear.py', '/home/me/train.py')
    """
    for part in _FOLDERS_OF_PACKAGES:
        if part in filename:
            return filename.rpartition(part)[2]
    for folder in (os.path.dirname(_PACKAGE.rstrip(os.sep)) + os.sep, _STANDARD_LIBRARY):
        if is_of_library(filename) and filename.startswith(folder):
            return filename.removeprefix(folder)
    return filename


def defined_at(owner: type[Any], method: str) -> str:
    """Return a sentence, with a leading space, that says where the user defined a method of a class.

    Return "" if the user did not define it. Errors about the method contain this sentence, because their traceback does
    not point to the method.
    """
    code = getattr(getattr(owner, method, None), "__code__", None)
    if code is None or is_of_library(code.co_filename):
        return ""
    return f" `{method}` is defined at {code.co_filename}:{code.co_firstlineno}."


ClassT = TypeVar("ClassT", bound=type[Any])
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_SAYS_ALL = (RaySGDError, KeyboardInterrupt)  # errors whose messages say everything, so raysgd's frames do not help
# Errors that a wrong argument or path usually causes. If the traceback has no user code, only its last frame is kept.
_MOSTLY_SAYS_ALL = (ValueError, TypeError, OSError, ImportError)
_MOST_FRAMES = 3


def hide_library_frames(cls: ClassT) -> ClassT:
    """Decorate a class so that errors raised by its constructor and public methods do not show library frames.

    Methods that the class inherits or that are abstract stay unchanged. `__next__` counts as a public method.
    """
    for name, value in [*vars(cls).items()]:
        is_public = not name.startswith("_") or name in ("__init__", "__next__")
        if is_public and inspect.isfunction(value) and not getattr(value, "__isabstractmethod__", False):
            setattr(cls, name, hides_library_frames(value))
    return cls


def hides_library_frames(method: MethodT) -> MethodT:
    """Decorate a method or generator function so that errors raised by it do not show library frames."""
    if inspect.isgeneratorfunction(method):

        @wraps(method)
        def items(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True  # tells pytest and IPython to hide this frame, too
            try:
                return (yield from method(*args, **kwargs))
            except BaseException as error:
                raise without_library_frames(error, unless="RAYSGD_TRACEBACK=full")

        return items  # type: ignore[return-value]

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            raise without_library_frames(error, unless="RAYSGD_TRACEBACK=full")

    return call  # type: ignore[return-value]


def without_library_frames(error: BaseException, unless: str) -> BaseException:
    """Remove library frames from the traceback of an error. Return the error.

    The traceback keeps all frames if `RAYSGD_TRACEBACK` is "full" or if the error may be a bug in raysgd.

    Args:
        error: The error to shorten. Its traceback starts in the caller of this function.
        unless: Hint on how to get the whole traceback. This function does not use the hint, but tracebacks show users
            the caller's line, which contains the hint.
    """
    trace = error.__traceback__
    inside = trace.tb_next if trace is not None else None
    kept = frames_of_user(inside, _MOST_FRAMES)
    if shows_all_frames() or (kept is None and not isinstance(error, _SAYS_ALL + _MOSTLY_SAYS_ALL)):
        return error.with_traceback(inside)
    if kept is None and not isinstance(error, _SAYS_ALL):
        kept = inside
        while kept is not None and kept.tb_next is not None:
            kept = kept.tb_next
    _hide_in_causes(error)
    return error.with_traceback(kept)


def _hide_in_causes(error: BaseException) -> None:
    """Remove library frames from the chained exceptions that Python prints before the error."""
    seen: list[BaseException] = [error]
    for each in seen:
        for before in (each.__cause__, each.__context__):
            if before is not None and before not in seen:
                before.__traceback__ = frames_of_user(before.__traceback__, _MOST_FRAMES)
                seen.append(before)
