"""What tests ask about processes."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not just what is left of one that ended."""
    return _state(pid) not in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Whether a process stands still: a signal that stops it arrives some moments after it was sent."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended while it was looked at
        return ""
