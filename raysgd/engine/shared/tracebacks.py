"""Errors leave the library with the user's frames only, which `RAYSGD_TRACEBACK=full` switches off.

The traceback of the error itself is cut, as in Keras and JAX: no hook of Python or IPython is replaced, and a debugger
finds the user's frames in the error, also those of a worker in this process. What may be a bug of raysgd stays whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from raysgd._text.frames import frames_of_user, shows_all_frames
from raysgd.exceptions import RaySGDError

ClassT = TypeVar("ClassT", bound=type[Any])
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_SAYS_ALL = (RaySGDError, KeyboardInterrupt)  # where in the library one was raised explains nothing
_MOSTLY_SAYS_ALL = (ValueError, TypeError, OSError, ImportError)  # a wrong argument or path, and now and then a bug
_MOST_FRAMES = 3


def hide_library_frames(cls: ClassT) -> ClassT:
    """Decorate a class whose public methods, and whose construction, users call."""
    for name, value in [*vars(cls).items()]:
        is_public = not name.startswith("_") or name in ("__init__", "__next__")
        if is_public and inspect.isfunction(value) and not getattr(value, "__isabstractmethod__", False):
            setattr(cls, name, hides_library_frames(value))
    return cls


def hides_library_frames(method: MethodT) -> MethodT:
    """Decorate a method that users call; or what makes an iterator, for each of its items."""
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
    """Return the error that a method of the library has raised, with what of its traceback helps a user.

    Args:
        error: The error, whose traceback begins in the function that calls this one.
        unless: What switches this off. It is here to be read: Python shows the line that calls this function.
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
    """Leave the frames of users in the errors that Python shows before this one."""
    seen: list[BaseException] = [error]
    for each in seen:
        for before in (each.__cause__, each.__context__):
            if before is not None and before not in seen:
                before.__traceback__ = frames_of_user(before.__traceback__, _MOST_FRAMES)
                seen.append(before)
