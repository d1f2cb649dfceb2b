"""Escapes text from files before a command or a log line shows it in a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

LONGEST = 300


def printable(text: str, longest: int | None = LONGEST) -> str:
    r"""Escape and shorten text from a file, so that it cannot move the cursor of a terminal or change its colors.

    Args:
        text: The text.
        longest: Number of characters to keep, or None to keep all.

    >>> print(printable("loss\x1b[31m"))
    loss\x1b[31m
    """
    kept = text if longest is None else text[:longest]
    safe = kept if kept.isprintable() else "".join(map(_escaped, kept))
    return safe if len(kept) == len(text) else f"{safe}..."


def printable_lines(text: str) -> str:
    """Escape each line of a text whose line breaks are ours."""
    return "\n".join(printable(line, None) for line in text.split("\n"))


@contextlib.contextmanager
def errors_printable() -> Iterator[None]:
    """Escape the messages of exceptions in the `with` block, and of their causes, because they may quote a file."""
    try:
        yield
    except Exception as raised:
        error: BaseException | None = raised
        while error is not None:
            error.args = tuple(printable_lines(each) if isinstance(each, str) else each for each in error.args)
            error = error.__cause__ or error.__context__
        raise


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
