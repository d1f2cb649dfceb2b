"""What tests ask about processes."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not just what is left of one that ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended while it was looked at
        return False
