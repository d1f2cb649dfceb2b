"""Text from files that is shown in a terminal."""

from __future__ import annotations

import pytest

from raysgd.core.text.log_lines import LONGEST, errors_printable, printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss, Größe, 損失", "loss, Größe, 損失"),
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("a\nstep 3: no jumps", r"a\nstep 3: no jumps"),
        ("a\u202eb\u2028c\x85d\x0be\ud800", r"a\u202eb\u2028c\x85d\x0be\ud800"),
    ],
)
def test_what_moves_the_cursor_or_turns_the_text_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_text_is_cut_off_only_where_that_is_asked_for() -> None:
    assert printable("x" * (LONGEST + 1)) == "x" * LONGEST + "..."
    assert printable("x" * 1000, None) == "x" * 1000


def test_only_line_feeds_break_lines() -> None:
    assert printable_lines("a\nb\rc\x1bd") == "a\nb\\rc\\x1bd"


def test_an_error_and_its_causes_are_escaped_and_stay_what_they_are() -> None:
    cause = KeyError("\x1b[2J", 3)
    with pytest.raises(ValueError, match=r"^a\nb\\x1b\[2J$"), errors_printable():
        raise ValueError("a\nb\x1b[2J") from cause
    assert cause.args == (r"\x1b[2J", 3)
