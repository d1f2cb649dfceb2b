"""Where headings of former pages are now, as `moved.txt` beside this file says."""

from __future__ import annotations

from pathlib import Path


def moved() -> dict[str, str]:
    """Return the new place of each heading, or why it was dropped. The title of a page comes first."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" = ", 1) for line in lines if line and not line.startswith("#")]
    return {former: new for former, new in pairs}
