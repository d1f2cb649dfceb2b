"""Finds out from its traceback if a library raised an exception. Pure functions."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator

_RAISE = dis.opmap["RAISE_VARARGS"]


def is_of(error: BaseException, package: str, passing_on: str = "") -> bool:
    """Return True if an exception came out of a library, not out of a `raise` in other Python code.

    If compiled code raised it, the traceback ends in the Python code that called it, at an instruction other than
    `raise`. It does not show whose compiled code that was, so it counts as the library's.

    Args:
        error: The exception.
        package: Name of the library's package. Nothing is from a package that is not imported.
        passing_on: A module of the package that raises exceptions from elsewhere again, such as from another process.
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
    """Return True if a file belongs to an imported module or package."""
    place: str | None = getattr(sys.modules.get(name), "__file__", None)
    if place is None:
        return False
    folder, own_name = os.path.split(place)
    return filename == place or (own_name == "__init__.py" and filename.startswith(folder + os.sep))


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
