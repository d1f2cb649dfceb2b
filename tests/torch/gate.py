"""Says when something may happen in workers, in tests of what is before or after that."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of


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


def mark_when_inside(trainer: TorchTrainer, mark: Path) -> None:
    """Makes the file once the driver has a snapshot that was taken inside a call."""
    deadline = time.monotonic() + 120
    while not controller_of(trainer).snapshots.is_inside and time.monotonic() < deadline:
        time.sleep(0.01)
    mark.touch()
