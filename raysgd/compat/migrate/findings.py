"""Findings about single lines of a program that is migrated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """Something that a person has to look at.

    Attributes:
        line: Of the program as it was, from 1.
        text: What it is, and what to do.
        is_error: Whether the program does not run because of it.
    """

    line: int
    text: str
    is_error: bool = False


class Findings:
    """Collects them, each once."""

    def __init__(self) -> None:
        self._found: dict[Finding, None] = {}

    def add(self, line: int, text: str, is_error: bool = False) -> None:
        """Notes one."""
        self._found[Finding(line, text, is_error)] = None

    def sorted(self) -> list[Finding]:
        """All of them, by line."""
        return sorted(self._found)
