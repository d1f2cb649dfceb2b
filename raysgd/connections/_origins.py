"""Pure: whether a library raised an exception or other code did, as far as its traceback tells."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator

_RAISE = dis.opmap["RAISE_VARARGS"]


def is_of(error: BaseException, package: str, passing_on: str = "") -> bool:
    """Return whether an exception came out of a library rather than out of a `raise` in anybody else's Python code.

    Where compiled code raised, the traceback ends in the Python code that called it, at an instruction that is no
    `raise`. Whose compiled code that was cannot be seen, so it counts as the library's.

    Args:
        error: The exception.
        package: That of the library, by name; it does not count where it is not imported.
        passing_on: A module in it that raises what was raised elsewhere before, such as in another process.
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
    """Return whether a file is that of an imported module, or lies in an imported package."""
    place: str | None = getattr(sys.modules.get(name), "__file__", None)
    if place is None:
        return False
    folder, own_name = os.path.split(place)
    return filename == place or (own_name == "__init__.py" and filename.startswith(folder + os.sep))


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, the one that it was raised because of, the one that that was raised because of, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
