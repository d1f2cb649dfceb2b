"""Says when new workers may come, in tests of what happens before or after that."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gate:
    """An `initialization_hook` that lets no worker process get ready as long as the gate is closed.

    Args:
        path: Of a file that is there while it is closed.
    """

    path: Path

    def __call__(self) -> None:
        while self.path.exists():
            time.sleep(0.01)

    def close(self) -> None:
        """Workers that start from now on wait."""
        self.path.touch()

    def open(self) -> None:
        """They go on."""
        self.path.unlink()
