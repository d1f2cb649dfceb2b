"""Says when something may happen in workers, in tests of what is before or after that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from raysgd.core.engine.monitor import Monitor
from raysgd.torch import TorchTrainer, TrainingOperator
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


class WaitsForSignal(TrainingOperator):
    """Waits in the step at which its program gets a signal, as long as the config's `gate` is there to say which."""

    def optimizer_step(self) -> None:
        gate = Path(self.config["gate"])
        with suppress(FileNotFoundError):
            while self.global_step >= int(gate.read_text()):
                time.sleep(0.01)
        super().optimizer_step()


@contextmanager
def waiting_for_signal(trainer: TorchTrainer, num_steps: int) -> Iterator[Path]:
    """Let workers wait behind so many steps until the driver has asked them to end there, however late it hears.

    Yields:
        The gate. Open it before that where workers die, which can be asked for nothing.
    """
    gate, hold = Path(trainer.config["gate"]), Monitor.hold_to_leave
    gate.write_text(str(num_steps))

    def hold_and_open(monitor: Monitor) -> None:
        hold(monitor)
        if monitor.is_leaving:
            gate.unlink(missing_ok=True)

    with patch.object(Monitor, "hold_to_leave", hold_and_open):
        yield gate
    gate.unlink(missing_ok=True)
