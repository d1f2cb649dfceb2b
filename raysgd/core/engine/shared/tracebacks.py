"""Cuts the frames of the library out of the errors that users see. `RAYSGD_TRACEBACK=full` keeps them.

Like Keras and JAX, this shortens the traceback of the error itself. It replaces no hook of Python or IPython, and a
debugger still stops in the user's frames, also in those of a worker in this process. An error that may be a bug of
raysgd keeps its whole traceback.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from raysgd.core.text.frames import frames_of_user, shows_all_frames
from raysgd.exceptions import RaySGDError

ClassT = TypeVar("ClassT", bound=type[Any])
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_SAYS_ALL = (RaySGDError, KeyboardInterrupt)  # the place in the library that raised one explains nothing
_MOSTLY_SAYS_ALL = (ValueError, TypeError, OSError, ImportError)  # mostly a wrong argument or path, rarely a bug
_MOST_FRAMES = 3


def hide_library_frames(cls: ClassT) -> ClassT:
    """Decorate a class: its constructor and public methods raise errors without frames of the library."""
    for name, value in [*vars(cls).items()]:
        is_public = not name.startswith("_") or name in ("__init__", "__next__")
        if is_public and inspect.isfunction(value) and not getattr(value, "__isabstractmethod__", False):
            setattr(cls, name, hides_library_frames(value))
    return cls


def hides_library_frames(method: MethodT) -> MethodT:
    """Decorate a method or a generator function that users call."""
    if inspect.isgeneratorfunction(method):

        @wraps(method)
        def items(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True  # pytest and IPython then leave out this frame too
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
    """Return an error of the library with only the part of its traceback that helps a user.

    Args:
        error: The error. Its traceback begins in the caller of this function.
        unless: How to switch this off. Unused: Python shows the calling line in the traceback, so the user reads it.
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
    """Hide library frames in the causes, which Python shows before this error."""
    seen: list[BaseException] = [error]
    for each in seen:
        for before in (each.__cause__, each.__context__):
            if before is not None and before not in seen:
                before.__traceback__ = frames_of_user(before.__traceback__, _MOST_FRAMES)
                seen.append(before)
