"""Removes library frames from the tracebacks that users see. `RAYSGD_TRACEBACK=full` disables this.

Library frames are all frames that are not user code, such as raysgd's own. Of the user code that raysgd called, at most
three frames are kept: the first and the last two.

As in Keras and JAX, the traceback of the exception object itself is shortened, and no hook of Python or IPython is
replaced. Debuggers still stop in the user's frames, even in a worker that runs in this process. An error that may be a
bug in raysgd keeps its whole traceback.
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
