"""Determines from an exception's traceback whether a given library, such as Ray, raised the exception."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator

_RAISE = dis.opmap["RAISE_VARARGS"]


def is_of(error: BaseException, package: str, passing_on: str = "") -> bool:
    """Return True if the library raised the exception, rather than a `raise` statement in other Python code.

    If compiled code raised the exception, the traceback ends in the Python code that called it, at an instruction other
    than `raise`. The traceback does not show which library the compiled code belongs to, so this function assumes that
    the code belongs to the given library.

    Args:
        error: The exception to classify.
        package: Name of the library's package. If the package is not imported, its Python code cannot have raised the
            exception.
        passing_on: Name of a module of the package that only re-raises exceptions, such as those from another process.
            An exception that this module raised does not count as raised by the library.
    """
    where = error.__traceback__
    if where is None:
        return False
    while where.tb_next is not None:
        where = where.tb_next
    code = where.tb_frame.f_code
    if _is_in(code.co_filename, package):
        return not _is_in(code.co_filename, passing_on)
    instructions = code.co_code
    return 0 <= where.tb_lasti < len(instructions) and instructions[where.tb_lasti] != _RAISE


def _is_in(filename: str, name: str) -> bool:
    """Return True if a source file belongs to the imported module or package `name`."""
    place: str | None = getattr(sys.modules.get(name), "__file__", None)
    if place is None:
        return False
    folder, own_name = os.path.split(place)
    return filename == place or (own_name == "__init__.py" and filename.startswith(folder + os.sep))


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then its cause, the cause's cause, and so on.

    For an exception without an explicit cause, its context is yielded instead, unless `from None` suppresses it.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
