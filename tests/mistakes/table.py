"""What is asked of every mistake: an error of its kind, short, with the line to write and the line that was running."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

MOST_LINES = 25
"""What fits on a screen beside a program."""


@dataclass(frozen=True)
class Mistake:
    """A mistake and what a user has to be told of it.

    Attributes:
        name: What is wrong, in a word or two.
        make: Makes it; gets a trainer that is ready to train.
        error: The class of the error.
        line: The line to write, or what says what is wrong where only the user can know the line.
        code: The user's line that was running; None where none was.
    """

    name: str
    make: Callable[[Any], object]
    error: type[BaseException]
    line: str
    code: str | None = None


def _beyond_tests(error: BaseException) -> Any:
    """Return its traceback without the frames of this file, which no program has."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def check(mistake: Mistake, trainer: Any) -> None:
    """Make the mistake, and look at what it says."""
    with pytest.raises(mistake.error) as caught:
        mistake.make(trainer)
    message = str(caught.value)
    assert mistake.line in message
    shown = "".join(traceback.format_exception(caught.value.with_traceback(_beyond_tests(caught.value))))
    assert len(shown.splitlines()) <= MOST_LINES, shown
    if mistake.code is not None:
        assert f": {mistake.code}" in message
        assert "mistaken.py:" in message
